"""Translates a constraint of any language to the matcher's language. Runs in the compiler's helper.

No part of a client's constraint is dropped silently: an unenforceable part is a GrammarError that names it, and a part
that asks for nothing is listed. White space between the parts of JSON is free, but never endless. Strings in JSON have
no \\u escapes: by one of these the name of a declared property could be written so that its schema does not see it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from api_server.constraints import ebnf, structural_tag
from api_server.constraints.limits import check_pattern, check_schema, check_size
from api_server.constraints.schema_terms import enforceable
from api_server.constraints.structural_tag import SchemaText
from interfaces import ConstraintKind
from shared.grammar import GrammarError

# `coerce_one_of` would take oneOf for anyOf, and a text that fits two branches for a valid one.
JSON_OPTIONS = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}",
    "json_allowed_escapes": '"\\bfnrt',
    "coerce_one_of": False,
    "lenient": False,
}

_OPTIONS_KEY = "x-guidance"
_JSON_IN_LARK = re.compile(r"%json\s*(?=\{)")


def translate(kind: str, source: str, special: Mapping[str, int]) -> tuple[str, list[str]]:
    """Returns `source` for `shared.grammar.Vocabulary.matcher`, and the parts of its schemas that ask for nothing.

    `special` are the special tokens. Raises GrammarError.
    """
    check_size(source, pattern=kind == ConstraintKind.REGEX)
    ignored: list[str] = []
    return _translated(kind, source, special, lambda schema: _schema_text(schema, ignored)), ignored


def _translated(kind: str, source: str, special: Mapping[str, int], schema_text: SchemaText) -> str:
    match kind:
        case ConstraintKind.JSON_SCHEMA:
            return f"start: %json {schema_text(_parsed(source))}"
        case ConstraintKind.REGEX:
            return _pattern(source)
        case ConstraintKind.CHOICE:
            return _pattern("|".join(map(_literal_pattern, _choices(source))))
        case ConstraintKind.EBNF:
            rule, lines = ebnf.to_lark(source)
            return "\n".join(["%llguidance {}", f"start: {rule}", *lines]) + "\n"
        case ConstraintKind.LARK:
            return _lark(source, schema_text)
        case ConstraintKind.STRUCTURAL_TAG:
            return structural_tag.to_lark(_parsed(source), special, schema_text)
    raise GrammarError(f"{kind} is no language of constraints")


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except json.JSONDecodeError as error:
        raise GrammarError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None


def _schema_text(schema: Any, ignored: list[str]) -> str:
    """The schema's text with our options in it; appends ignored parts to `ignored`."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema must be an object, got {json.dumps(schema):.60}")
    check_schema(schema)
    found, left_out = enforceable(schema)
    ignored += left_out
    if not isinstance(found, dict):
        raise GrammarError("no text can match it")
    return json.dumps({**found, _OPTIONS_KEY: JSON_OPTIONS}, ensure_ascii=False)


def _pattern(pattern: str) -> str:
    check_pattern(pattern)
    return LLMatcher.grammar_from_regex(pattern)


def _choices(source: str) -> list[str]:
    choices = _parsed(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise GrammarError("it must be a list of texts, none of them empty, and at least one")
    return choices


def _literal_pattern(text: str) -> str:
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def _lark(source: str, schema_text: SchemaText) -> str:
    """Lark whose schemas are checked and have our options."""
    decoder = json.JSONDecoder()
    parts = []
    position = 0
    for found in _JSON_IN_LARK.finditer(source):
        if found.start() < position:
            continue  # within a schema
        try:
            schema, end = decoder.raw_decode(source, found.end())
        except (json.JSONDecodeError, RecursionError) as error:
            raise GrammarError(f"%json at position {found.start()}: {error}") from None
        parts += [source[position : found.end()], schema_text(schema)]
        position = end
    return "".join([*parts, source[position:]])
