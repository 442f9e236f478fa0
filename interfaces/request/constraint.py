"""The form that an answer must have, as its client described it: a JSON schema, a pattern, a grammar.

Knows the languages by name and carries the description; the compiler in the API process reads it, and decides whether
it can be enforced. The compiled form and its beginning cross the wire, as `TextContext.grammar` and
`TextContext.grammar_state`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Constraint", "ConstraintKind"]


class ConstraintKind(enum.StrEnum):
    """The language of `Constraint.source`."""

    # JSON text of a schema; `{"type": "object"}` is any JSON object.
    JSON_SCHEMA = "json_schema"
    # A regular expression that the whole answer matches.
    REGEX = "regex"
    # JSON text of a list of strings: the answer is one of them.
    CHOICE = "choice"
    # Rules `name ::= ...` in the GBNF of llama.cpp and xgrammar; begins at `root`.
    EBNF = "ebnf"
    # llguidance's dialect of Lark, begins at `start`. `%json {...}` holds a schema, `<name>` is a special token.
    LARK = "lark"
    # JSON text of a structural tag of SGLang and xgrammar: free text with constrained parts.
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """The constraint of a request, which has at most one.

    `begins_after` is a text (`</think>`): until the model has written it, nothing is constrained. `field` is the
    client's name of the value, by which errors speak of it.
    """

    kind: ConstraintKind
    source: str
    begins_after: str = ""
    field: str = ""
