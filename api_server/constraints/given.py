"""Finds the one `Constraint` of a request under the names that bodies use.

Knows that there may be only one and how its value becomes text. Does not look at the meaning of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from api_server.body.unknown_fields import report_unknown
from api_server.errors import invalid, unsupported
from interfaces import Constraint, ConstraintKind

ANY_OBJECT = '{"type":"object"}'

_TEXTS = (ConstraintKind.REGEX, ConstraintKind.EBNF, ConstraintKind.LARK)

# Field, language and value; None means that the field is absent.
Entry = tuple[str, ConstraintKind, Any]


def one_of(entries: Iterable[Entry]) -> Constraint | None:
    """The constraint that a body gives; None without any. Raises RequestFailed when there is more than one."""
    found = [entry for entry in entries if entry[2] is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise invalid(f"{names} exclude each other: give one of them", found[1][0])
    return made(*found[0]) if found else None


def made(field: str, kind: ConstraintKind, value: Any) -> Constraint:
    """Makes the constraint of one value, text or JSON. Raises RequestFailed."""
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


# Types of a response format, and the keys of the form itself: `json_schema` or, in the Responses API, `schema` for
# OpenAI's clients; `value` for those of TGI and huggingface_hub; `schema` or `pattern` for those of llama.cpp and
# Together.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("value", "schema"),
    "json": ("value", "schema"),
    "regex": ("value", "pattern"),
    "json_schema": ("json_schema", "value", "schema"),
}
_ANNOTATIONS = frozenset({"type", "name", "description", "strict"})
# Names that ask for a form: one that the type does not have is refused, and not ignored silently.
_ASKING = frozenset({place for places in _PLACES.values() for place in places} | {"regex", "grammar", "ebnf", "choice"})


def response_format(value: Any, field: str = "response_format") -> Constraint | None:
    """The constraint of a response format: OpenAI's forms, the Responses API's, TGI's and llama.cpp's.

    Raises RequestFailed.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise invalid(f"{field} must be an object with a type", field)
    kind = value["type"]
    if kind == "structural_tag":
        return made(field, ConstraintKind.STRUCTURAL_TAG, value)
    if kind not in _PLACES:
        known = f"{', '.join(_PLACES)} or structural_tag"
        raise invalid(f"{field}.type must be {known}, got {kind!r:.100}", field)
    place, form = _placed(value, kind, field)
    match kind:
        case "text":
            return None
        case "json_object" if form is None or form == {}:
            return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT, field=field)
        case "json_schema" if place != "schema":
            return made(field, ConstraintKind.JSON_SCHEMA, _schema_in(form, f"{field}.{place}"))
        case "regex":
            if not isinstance(form, str):
                raise invalid(f"{field}.{place} must be a pattern, a text, got {form!r:.100}", field)
            return made(field, ConstraintKind.REGEX, form)
    if not isinstance(form, dict | str) or (isinstance(form, str) and place != "value"):
        raise invalid(f"{field}.{place} must be a JSON schema (an object), got {form!r:.100}", field)
    return made(field, ConstraintKind.JSON_SCHEMA, form)


def _placed(value: dict[str, Any], kind: str, field: str) -> tuple[str, Any]:
    """The place of the form, and the form. Raises RequestFailed for a key that asks for a form of another type."""
    given = {name: part for name, part in value.items() if part is not None}
    places = _PLACES[kind]
    for name in given:
        if name in _ASKING and name not in places:
            raise invalid(
                f"{field}.{name} does not belong to type {kind}, and would not be enforced", f"{field}.{name}"
            )
    found = [name for name in places if name in given]
    if len(found) > 1:
        raise invalid(f"{field}.{found[0]} and {field}.{found[1]} exclude each other: give one of them", field)
    report_unknown(f"{field}.{name}" for name in given if name not in _ANNOTATIONS | _ASKING)
    place = found[0] if found else next(iter(places), "")
    return place, given.get(place)


def _schema_in(wrapper: Any, path: str) -> Any:
    """The schema of `{"name": ..., "schema": ...}`."""
    if not isinstance(wrapper, dict):
        raise invalid(f"{path} must be an object with a schema", path)
    if not isinstance(wrapper.get("schema"), dict):
        raise invalid(f"{path}.schema must be a JSON schema (an object)", path)
    report_unknown(f"{path}.{name}" for name in wrapper if name not in _ANNOTATIONS | {"schema"})
    return wrapper["schema"]


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

# Further fields of OpenAI's bodies, as the clients of vLLM and SGLang send them, that this module reads.
EXTRAS = frozenset({*_GUIDED, *_SGLANG, "structured_outputs", "guided_decoding_backend", "guided_whitespace_pattern"})


def of_openai_body(raw: dict[str, Any], format_field: str = "response_format") -> Constraint | None:
    """The constraint of `response_format`, vLLM's `guided_*` and `structured_outputs`, and SGLang's names.

    Raises RequestFailed for more than one.
    """
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
    """The constraint in SGLang's sampling parameters; an empty attribute is none."""
    return one_of((name, kind, getattr(given, name) or None) for name, kind in _SGLANG.items())


def of_tgi(grammar: Any) -> Constraint | None:
    """The constraint of TGI's `{"type": "json" | "regex" | "json_schema", "value": ...}`. Raises RequestFailed."""
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


# Further members of `structured_outputs` that would change the form.
_CHANGING = frozenset({"disable_any_whitespace", "whitespace_pattern", "disable_additional_properties"})


def _structured(value: Any) -> list[Entry]:
    if value is None:
        return []
    if not isinstance(value, dict):
        raise invalid("structured_outputs must be an object", "structured_outputs")
    for name in _CHANGING:
        if value.get(name) not in (None, False):
            raise unsupported(f"structured_outputs.{name}", "another form of JSON")
    entries: list[Entry] = [(f"structured_outputs.{name}", kind, value.get(name)) for name, kind in _STRUCTURED.items()]
    if value.get("json_object"):
        entries.append(("structured_outputs.json_object", ConstraintKind.JSON_SCHEMA, ANY_OBJECT))
    return entries
