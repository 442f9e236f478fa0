"""Turns a JSON object into a dialect's pydantic model, and pydantic's findings into one sentence about one field."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)


class Mismatch(ValueError):
    """The first thing that is wrong: `field` is its path (`parameters.stop[0]`), `kind` pydantic's name of the rule."""

    def __init__(self, field: str, problem: str, kind: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.kind = kind


def parse(model: type[M], value: object) -> M:
    """`value` as a `model`. Raises Mismatch."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _mismatch(error) from None


def _mismatch(error: ValidationError) -> Mismatch:
    found = error.errors(include_url=False, include_context=False)
    # Of the branches of a union, the one that got furthest is what the client meant.
    first = max((e for e in found if e["loc"][:1] == found[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    field = _path(first["loc"])
    if first["type"] == "missing":
        return Mismatch(field, f"missing field `{first['loc'][-1]}`", "missing")
    return Mismatch(field, f"{first['msg']}, got {_shown(first['input'])}", first["type"])


def _path(location: tuple[int | str, ...]) -> str:
    """Without the names of a union's branches, which mean nothing to a client."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool", "none"):
            path += f".{part}" if path else part
    return path


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
