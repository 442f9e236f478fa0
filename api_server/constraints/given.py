"""From the names under which bodies give a constraint to the one `Constraint` of a request.

Knows that there may be only one and how its value becomes text. What the text means is not looked at here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from api_server.errors import invalid, unsupported
from interfaces.constraint import Constraint, ConstraintKind

ANY_OBJECT = '{"type":"object"}'

_TEXTS = (ConstraintKind.REGEX, ConstraintKind.EBNF, ConstraintKind.LARK)

Entry = tuple[str, ConstraintKind, Any]
"""Field, language and value; a value None is not given."""


def one_of(entries: Iterable[Entry]) -> Constraint | None:
    """The constraint that a body gives; None without any. Raises RequestFailed when there is more than one."""
    found = [entry for entry in entries if entry[2] is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise invalid(f"{names} exclude each other: give one of them", found[1][0])
    return made(*found[0]) if found else None


def made(field: str, kind: ConstraintKind, value: Any) -> Constraint:
    """The constraint of one value, text or JSON. Raises RequestFailed."""
    if isinstance(value, str):
        text = value
    elif kind in _TEXTS:
        raise invalid(f"{field} must be a text, got {value!r:.100}", field)
    else:
        try:
            text = orjson.dumps(value).decode()
        except TypeError:
            raise invalid(f"{field} is nested too deeply", field) from None
    if not text.strip():
        raise invalid(f"{field} must not be empty", field)
    return Constraint(kind, text, field=field)


def response_format(value: Any, field: str = "response_format") -> Constraint | None:
    """OpenAI's forms of it, and the flat form of the Responses API. Raises RequestFailed."""
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise invalid(f"{field} must be an object with a type", field)
    match value["type"]:
        case "text":
            return None
        case "json_object":
            return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT, field=field)
        case "json_schema":
            return _named_schema(value, field)
        case "structural_tag":
            return made(field, ConstraintKind.STRUCTURAL_TAG, value)
    known = "text, json_object, json_schema or structural_tag"
    raise invalid(f"{field}.type must be {known}, got {value['type']!r:.100}", field)


def _named_schema(value: dict[str, Any], field: str) -> Constraint:
    wrapper = value.get("json_schema", value)
    if not isinstance(wrapper, dict):
        raise invalid(f"{field}.json_schema must be an object with a schema", field)
    schema = wrapper.get("schema")
    if not isinstance(schema, dict):
        raise invalid(f"{field}.json_schema.schema must be a JSON schema (an object)", field)
    return made(field, ConstraintKind.JSON_SCHEMA, schema)


_GUIDED = {
    "guided_json": ConstraintKind.JSON_SCHEMA,
    "guided_regex": ConstraintKind.REGEX,
    "guided_choice": ConstraintKind.CHOICE,
    "guided_grammar": ConstraintKind.EBNF,
}
_STRUCTURED = {
    "json": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "choice": ConstraintKind.CHOICE,
    "grammar": ConstraintKind.EBNF,
    "structural_tag": ConstraintKind.STRUCTURAL_TAG,
}
_SGLANG = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "ebnf": ConstraintKind.EBNF,
    "structural_tag": ConstraintKind.STRUCTURAL_TAG,
}

EXTRAS = frozenset({*_GUIDED, *_SGLANG, "structured_outputs", "guided_decoding_backend", "guided_whitespace_pattern"})
"""Further fields of OpenAI's bodies, as the clients of vLLM and SGLang send them, that this module reads."""


def of_openai_body(raw: dict[str, Any], format_field: str = "response_format") -> Constraint | None:
    """`response_format`, vLLM's `guided_*` and `structured_outputs`, SGLang's names: at most one. RequestFailed."""
    if raw.get("guided_whitespace_pattern") is not None:
        raise unsupported("guided_whitespace_pattern", "a pattern for white space")
    entries: list[Entry] = [(name, kind, raw.get(name)) for name, kind in (_GUIDED | _SGLANG).items()]
    entries += _structured(raw.get("structured_outputs"))
    form = raw.get(format_field)
    extra = one_of(entries)
    formatted = response_format(form, format_field)
    if extra is not None and formatted is not None:
        raise invalid(f"{format_field} and {extra.field} exclude each other: give one of them", extra.field)
    return formatted or extra


def of_sampling_params(given: Any) -> Constraint | None:
    """SGLang's own: attributes of its sampling parameters, of which an empty one is none."""
    return one_of((name, kind, getattr(given, name) or None) for name, kind in _SGLANG.items())


def of_tgi(grammar: Any) -> Constraint | None:
    """TGI's `{"type": "json" | "regex" | "json_schema", "value": ...}`. Raises RequestFailed."""
    if grammar is None:
        return None
    value = grammar.get("value") if isinstance(grammar, dict) else None
    match grammar.get("type") if isinstance(grammar, dict) else None:
        case "json" if isinstance(value, dict | str):
            return made("grammar", ConstraintKind.JSON_SCHEMA, value)
        case "json_schema" if isinstance(value, dict) and isinstance(value.get("schema"), dict):
            return made("grammar", ConstraintKind.JSON_SCHEMA, value["schema"])
        case "regex" if isinstance(value, str):
            return made("grammar", ConstraintKind.REGEX, value)
    raise invalid(
        "`grammar` must be {type: json, value: a schema}, {type: regex, value: a pattern} or "
        f"{{type: json_schema, value: {{schema: a schema}}}}, got {grammar!r:.100}",
        "grammar",
    )


def _structured(value: Any) -> list[Entry]:
    if value is None:
        return []
    if not isinstance(value, dict):
        raise invalid("structured_outputs must be an object", "structured_outputs")
    entries: list[Entry] = [(f"structured_outputs.{name}", kind, value.get(name)) for name, kind in _STRUCTURED.items()]
    if value.get("json_object"):
        entries.append(("structured_outputs.json_object", ConstraintKind.JSON_SCHEMA, ANY_OBJECT))
    return entries
