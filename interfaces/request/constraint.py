"""The form that an answer must have, as its client described it: a JSON schema, a pattern, a grammar.

Knows the languages by name and carries the description; what a description means, and whether it can be enforced, is
for the compiler in the API process to say. What crosses the wire is the compiled form, `TextContext.grammar`, and
where it begins, `TextContext.grammar_state`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

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
