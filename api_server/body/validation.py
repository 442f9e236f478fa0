"""Turns a JSON object into a dialect's pydantic model, and pydantic's findings into one sentence about one field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from api_server.errors import shown

M = TypeVar("M", bound=BaseModel)


class Mismatch(ValueError):
    """The first error in a value: `field` is its path (`parameters.stop[0]`), `kind` pydantic's name of the rule."""

    def __init__(self, field: str, problem: str, kind: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.kind = kind


def parse(model: type[M], value: object) -> M:
    """Validates `value` as a `model`. Raises Mismatch.

    4.0 is an integer, as in JSON Schema: where an integer is wanted, it becomes one in `value`, too.
    """
    attempts = 0
    while True:
        try:
            return model.model_validate(value)
        except ValidationError as error:
            found = error.errors(include_url=False)
        whole = [error["loc"] for error in found if error["type"] in _WANTED_INTEGER and _is_whole(error["input"])]
        attempts += 1
        if not whole or attempts > _ATTEMPTS:
            raise _mismatch(found) from None
        for place in whole:
            _correct(value, place)


_WANTED_INTEGER = ("int_type", "literal_error")
# Beyond these a number of JSON is no integer that could be written again.
_INTEGERS = 1 << 63
# Most corrections. Each corrects all places that pydantic has named; in a list of lists it names the first only.
_ATTEMPTS = 8


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) < _INTEGERS


def _correct(value: Any, place: Sequence[int | str]) -> None:
    """Turns the whole float at this place, and its neighbours in lists, into integers, in place.

    `place` has names of a union's branches among the keys: a key that is not there is one of them.
    """
    lists: list[Any] | None = None
    for key in place:
        if not _is_key(key, value):
            continue
        if isinstance(value, dict):
            lists = None
        elif lists is None:
            lists = value
        inner: Any = value[key]
        if _is_whole(inner):
            if lists is None:
                value[key] = int(inner)
            else:
                _make_integers(lists)
        value = inner


def _make_integers(values: list[Any]) -> None:
    for i, item in enumerate(values):
        if isinstance(item, list):
            _make_integers(item)
        elif _is_whole(item):
            values[i] = int(item)


def _is_key(key: int | str, value: Any) -> bool:
    return isinstance(key, int) if isinstance(value, list) else isinstance(value, dict) and key in value


def _mismatch(found: list[ErrorDetails]) -> Mismatch:
    # The client meant the branch of a union that got furthest, and at the same place the one whose type is right.
    # With too many items validation stops early.
    same = (e for e in found if e["loc"][:1] == found[0]["loc"][:1])
    first = max(same, key=lambda e: (e["type"] == _TOO_MANY, len(e["loc"]), not e["type"].endswith("_type")))
    field = _path(first["loc"])
    if first["type"] == _TOO_MANY:
        count = len(first["input"])
        most = first["ctx"]["max_length"]
        return Mismatch(field, f"{count} entries were given; at most {most} are possible: send fewer", _TOO_MANY)
    if first["type"] == "missing":
        return Mismatch(field, f"missing field `{first['loc'][-1]}`", "missing")
    # Pydantic names the class of ours that an object would become.
    problem = first["msg"].partition(" or instance of ")[0]
    return Mismatch(field, f"{problem}, got {shown(first['input'])}", first["type"])


# Pydantic's name of the rule that a list or an object has broken.
_TOO_MANY = "too_long"


def _path(location: tuple[int | str, ...]) -> str:
    """The path of a field without the names of a union's branches, which mean nothing to a client."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool", "none"):
            path += f".{part}" if path else part
    return path
