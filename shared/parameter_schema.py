"""The JSON schemas of logits processors' parameters: a small part of JSON Schema, checked where requests come in.

A schema comes from the operator and values from clients. Keywords outside of this part are refused when the schema is
read, so none is ignored. There are no patterns: they would let a client's text take any time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Keywords that describe and do not restrict.
_NOTES = frozenset({"$schema", "title", "description", "default", "examples"})
_KEYWORDS = _NOTES | {
    "type",
    "enum",
    "const",
    "anyOf",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
}
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Schemas may lie this deep inside each other.
_DEEPEST = 20
# Most characters of a value that an error shows.
_SHOWN = 60


def check_schema(schema: Any) -> None:
    """Check the schema of an object of parameters. ValueError names a keyword that cannot be used, by its path."""
    _check_schema(schema, "schema", _DEEPEST)
    if schema.get("type") != "object":
        raise ValueError('schema.type must be "object": parameters are an object')


def problem(schema: Mapping[str, Any], value: Any, path: str) -> str | None:
    """Return what is wrong with a value by a checked schema, in a sentence that names `path` or a part of it, or
    None."""
    if "anyOf" in schema and all(problem(option, value, path) for option in schema["anyOf"]):
        return f"{path} fits none of the forms that its schema allows, got {_shown(value)}"
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return f"{path} must be one of {_shown(schema['enum'])}, got {_shown(value)}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{path} must be {_shown(schema['const'])}, got {_shown(value)}"
    kinds = schema.get("type", list(_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is(value, kind) for kind in kinds):
        return f"{path} must be {' or '.join(map(_with_article, kinds))}, got {_shown(value)}"
    if isinstance(value, Mapping):
        return _object_problem(schema, value, path)
    if isinstance(value, list):
        return _size_problem(schema, "Items", len(value), path, "entries") or _items_problem(schema, value, path)
    if isinstance(value, str):
        return _size_problem(schema, "Length", len(value), path, "characters")
    return _number_problem(schema, value, path)


def _object_problem(schema: Mapping[str, Any], value: Mapping[str, Any], path: str) -> str | None:
    known = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        return f"{path}.{missing[0]} is missing"
    others = schema.get("additionalProperties", True)
    for name, part in value.items():
        rule = known.get(name, others)
        if rule is False:
            listed = ", ".join(known) or "nothing"
            return f"{path}.{name[:_SHOWN]} is not known: {path} may have {listed}"
        found = None if rule is True else problem(rule, part, f"{path}.{name[:_SHOWN]}")
        if found is not None:
            return found
    return None


def _items_problem(schema: Mapping[str, Any], value: list[Any], path: str) -> str | None:
    if "items" not in schema:
        return None
    problems = (problem(schema["items"], part, f"{path}[{i}]") for i, part in enumerate(value))
    return next((found for found in problems if found is not None), None)


def _size_problem(schema: Mapping[str, Any], what: str, size: int, path: str, unit: str) -> str | None:
    if size < schema.get(f"min{what}", 0):
        return f"{path} must have at least {schema[f'min{what}']} {unit}, got {size}"
    if size > schema.get(f"max{what}", size):
        return f"{path} must have at most {schema[f'max{what}']} {unit}, got {size}"
    return None


def _number_problem(schema: Mapping[str, Any], value: Any, path: str) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{path} must be a finite number, got {value}"
    if value < schema.get("minimum", value):
        return f"{path} must be at least {schema['minimum']}, got {_shown(value)}"
    if value > schema.get("maximum", value):
        return f"{path} must be at most {schema['maximum']}, got {_shown(value)}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        return f"{path} must be above {schema['exclusiveMinimum']}, got {_shown(value)}"
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        return f"{path} must be below {schema['exclusiveMaximum']}, got {_shown(value)}"
    return None


def _check_schema(schema: Any, path: str, depth: int) -> None:
    _require(isinstance(schema, Mapping), path, "must be an object")
    _require(depth > 0, path, f"lies more than {_DEEPEST} schemas deep")
    for name in schema:
        _require(name in _KEYWORDS, f"{path}.{name}", f"is not supported: use {', '.join(sorted(_KEYWORDS))}")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    _require(isinstance(kinds, list), f"{path}.type", "must be a name or a list of names")
    _require(all(kind in _TYPES for kind in kinds), f"{path}.type", f"must be one of {', '.join(_TYPES)}")
    _require(isinstance(schema.get("enum", []), list), f"{path}.enum", "must be a list")
    required = schema.get("required", [])
    _require(
        isinstance(required, list) and all(isinstance(name, str) for name in required),
        f"{path}.required",
        "must be a list of names",
    )
    for name in _COUNTS:
        _require(_is(schema.get(name, 0), "integer"), f"{path}.{name}", "must be a whole number")
    for name in _LIMITS:
        _require(_is(schema.get(name, 0), "number"), f"{path}.{name}", "must be a number")
    _check_parts(schema, path, depth)


def _check_parts(schema: Mapping[str, Any], path: str, depth: int) -> None:
    """Check the schemas inside of a schema."""
    properties = schema.get("properties", {})
    _require(isinstance(properties, Mapping), f"{path}.properties", "must be an object")
    parts = {f"properties.{name}": part for name, part in properties.items()}
    options = schema.get("anyOf", [])
    listed = isinstance(options, list) and bool(options) == ("anyOf" in schema)
    _require(listed, f"{path}.anyOf", "must be a list of at least one schema")
    parts |= {f"anyOf[{i}]": part for i, part in enumerate(options)}
    others = schema.get("additionalProperties", True)
    if not isinstance(others, bool):
        parts["additionalProperties"] = others
    if "items" in schema:
        parts["items"] = schema["items"]
    for name, part in parts.items():
        _check_schema(part, f"{path}.{name}", depth - 1)


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "object":
            return isinstance(value, Mapping)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return whole and not isinstance(value, bool)
        case _:
            return isinstance(value, int | float) and not isinstance(value, bool)


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _with_article(kind: str) -> str:
    if kind == "null":
        return kind
    return f"an {kind}" if kind[0] in "aio" else f"a {kind}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _require(holds: bool, path: str, text: str) -> None:
    if not holds:
        raise ValueError(f"{path} {text}")
