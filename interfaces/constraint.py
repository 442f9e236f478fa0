"""The form that an answer must have, as its client described it: a JSON schema, a pattern, a grammar.

Knows the languages by name and carries the description; what a description means, and whether it can be enforced, is
for the compiler in the API process to say. What crosses the wire is the compiled form, `TextContext.grammar`, and
where it begins, `TextContext.grammar_state`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Constraint", "ConstraintKind"]


class ConstraintKind(enum.StrEnum):
    """The language of `Constraint.source`."""

    JSON_SCHEMA = "json_schema"
    """JSON text of a schema; `{"type": "object"}` is any JSON object."""
    REGEX = "regex"
    """A regular expression that the whole answer matches."""
    CHOICE = "choice"
    """JSON text of a list of strings: the answer is one of them."""
    EBNF = "ebnf"
    """Rules `name ::= ...` in the GBNF of llama.cpp and xgrammar; begins at `root`."""
    LARK = "lark"
    """llguidance's dialect of Lark, begins at `start`. `%json {...}` holds a schema, `<name>` is a special token."""
    STRUCTURAL_TAG = "structural_tag"
    """JSON text of a structural tag of SGLang and xgrammar: free text with constrained parts."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """One request has at most one.

    `begins_after` is a text (`</think>`): until the model has written it, nothing is constrained. `field` is the
    client's name of the value, by which errors speak of it.
    """

    kind: ConstraintKind
    source: str
    begins_after: str = ""
    field: str = ""

    @classmethod
    def one_of(cls, given: Sequence[tuple[str, ConstraintKind, Any]]) -> Constraint | None:
        """The constraint that a body gives under one of several names; None without any.

        Entries are (field, kind, value); a value None is not given. ValueError when more than one is, or one is empty.
        """
        found = [entry for entry in given if entry[2] is not None]
        if len(found) > 1:
            names = " and ".join(name for name, _, _ in found)
            raise ValueError(f"{names} exclude each other: give one of them")
        for name, kind, value in found:
            return cls(kind, _source(name, value), field=name)
        return None


def _source(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else _json(name, value)
    if not text.strip():
        raise ValueError(f"{name} must not be empty")
    return text


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{name} is nested too deeply") from error
