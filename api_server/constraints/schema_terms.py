"""Rewrites parts of a JSON schema that the matcher would refuse or misread, although they can be enforced.

Terms that restrict nothing are dropped, because they ask for nothing. Numbers, which the matcher keeps as floating
point, are rounded into the range that was asked for, or refused where only the exact number would do. An error names
the place of what cannot be enforced. Knows schemas as data; compiles nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from shared.grammar import GrammarError

# Formats that the matcher knows. By the standard any other is an annotation.
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)

# The largest whole number that 64 bits hold as an integer and as floating point. The matcher counts with both.
_LARGEST = 2**63 - 1024
# Bounds nearer to zero have more digits than a pattern of the matcher can have.
_SMALLEST = 1e-30
# The matcher needs both ends of a range from this number on.
_MOST_DIGITS = 10**18

_INEXACT = "which cannot be enforced exactly; numbers up to 2^53 and of up to 15 digits can be, and texts"
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
)
_ONE = (
    "additionalProperties", "items", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_UNENFORCEABLE = (
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip


def enforceable(schema: Any) -> tuple[Any, list[str]]:
    """The schema for the matcher, and descriptions of the dropped parts.

    GrammarError names the place of what cannot be enforced.
    """
    remarks: list[str] = []
    return _tidied(schema, "", remarks), remarks


def loosened(schema: Any) -> Any:
    """A looser schema without the terms that cannot be enforced. Every answer valid by `schema` is valid by it."""
    if not isinstance(schema, Mapping):
        return schema
    found = {name: _loosened_below(name, value) for name, value in schema.items() if name not in _UNENFORCEABLE}
    if "oneOf" in found:
        found["allOf"] = [*found.get("allOf", []), {"anyOf": found.pop("oneOf")}]
    for name in ("const", "enum"):
        if name in found and _misread(found[name]) is not None:
            del found[name]
    return found


def _loosened_below(name: str, value: Any) -> Any:
    return _mapped(name, value, lambda part, _: loosened(part))


def shallow(schema: Any) -> Mapping[str, Any]:
    """The names and types of the properties of a schema, without the rest."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {"type": "object"}
    types = {name: part.get("type") if isinstance(part, Mapping) else None for name, part in properties.items()}
    required = schema.get("required")
    return {
        "type": "object",
        "properties": {name: {"type": kind} if isinstance(kind, str) else {} for name, kind in types.items()},
        "required": [name for name in required if name in types] if isinstance(required, list) else [],
    }


def _tidied(schema: Any, path: str, remarks: list[str]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    below = {
        name: _mapped(name, value, lambda part, place: _tidied(part, path + place, remarks))
        for name, value in schema.items()
    }
    if takes_all(below.get("not")):
        return False
    kept = {name: value for name, value in below.items() if not _is_idle(name, value, below)}
    remarks += [f"{path}/{name}" for name in below if name not in kept]
    if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
        remarks.append(f"{path}/format {kept.pop('format')!r:.60}")
    refused = [name for name in _UNENFORCEABLE if name in kept]
    if refused:
        raise GrammarError(f"{path or 'the schema'} has {', '.join(refused)}, which cannot be enforced")
    for name in ("const", "enum"):
        misread = _misread(kept[name]) if name in kept else None
        if misread is not None:
            raise GrammarError(f"{path}/{name} has the number {misread!r}, {_INEXACT}")
    bounds = _bounds(kept, path)
    return {name: value for name, value in kept.items() if name not in _BOUNDS or isinstance(value, bool)} | bounds


def _mapped(name: str, value: Any, change: Callable[[Any, str], Any]) -> Any:
    """The value of a keyword with its schemas changed; `change` gets each schema and its place."""
    if name in _LISTS and isinstance(value, list):
        return [change(part, f"/{name}/{i}") for i, part in enumerate(value)]
    if name in _MAPS and isinstance(value, Mapping):
        return {key: change(part, f"/{name}/{key:.60}") for key, part in value.items()}
    return change(value, f"/{name}") if name in _ONE else value


def takes_all(schema: Any) -> bool:
    """True when the schema plainly restricts nothing."""
    return schema is True or (isinstance(schema, Mapping) and all(name in _ANNOTATIONS for name in schema))


def _takes_texts(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return schema is True
    kind = schema.get("type")
    others = {name: part for name, part in schema.items() if name != "type"}
    return takes_all(others) and ("string" in kind if isinstance(kind, list) else kind in ("string", None))


def _idle_dependencies(given: Any, _: Mapping[str, Any]) -> bool:
    return isinstance(given, Mapping) and all(part == [] or takes_all(part) for part in given.values())


# Tests by keyword: true when the keyword, with this value and in this schema, restricts nothing.
_IDLE: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "propertyNames": lambda value, _: _takes_texts(value),
    "uniqueItems": lambda value, _: value is False,
    "not": lambda value, _: value is False,
    "if": lambda _, schema: takes_all(schema.get("then", True)) and takes_all(schema.get("else", True)),
    "then": lambda value, schema: "if" not in schema or takes_all(value),
    "else": lambda value, schema: "if" not in schema or takes_all(value),
    "contains": lambda _, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda value, schema: "contains" not in schema or (value == 0 and "maxContains" not in schema),
    "maxContains": lambda _, schema: "contains" not in schema,
    "dependentRequired": _idle_dependencies,
    "dependentSchemas": _idle_dependencies,
    "dependencies": _idle_dependencies,
    "unevaluatedProperties": lambda value, _: takes_all(value),
    "unevaluatedItems": lambda value, _: takes_all(value),
}


def _is_idle(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    return name in _IDLE and _IDLE[name](value, schema)


def _misread(value: Any) -> int | float | None:
    """The first number in a value that the matcher would misread, or None."""
    stack = [value]
    while stack:
        found = stack.pop()
        if isinstance(found, Mapping):
            stack += found.values()
        elif isinstance(found, list):
            stack += found
        elif isinstance(found, int | float) and not isinstance(found, bool) and not _is_written_as_read(found):
            return found
    return None


def _is_written_as_read(number: int | float) -> bool:
    """True when the matcher reads the number exactly, and can write all digits of a fraction."""
    if _as_read(number) != number:
        return False
    return float(number).is_integer() or int("".join(map(str, Decimal(repr(number)).as_tuple().digits))) < 10**15


def _as_read(number: int | float) -> float | None:
    """The matcher's reading of a number's digits: a whole number times a power of ten."""
    if isinstance(number, int):
        return float(number) if abs(number) < 2**63 else None
    if not math.isfinite(number):
        return None
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int)
    whole = float(int("".join(map(str, digits))))
    if not -300 <= exponent <= 300:
        return None
    found = whole * float(f"1e{exponent}") if exponent >= 0 else whole / float(f"1e{-exponent}")
    return -found if sign else found


def _bounds(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The schema's bounds as numbers that the matcher reads exactly, never wider than asked for."""
    whole = schema.get("type") == "integer"
    found: dict[str, Any] = {}
    for name in _BOUNDS:
        value = schema.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        lower = name in _LOWER
        place = f"{path}/{name}"
        if whole and name in _EXCLUSIVE and abs(value) >= 2**53:
            # Beyond, the matcher's arithmetic cannot go on by one.
            name = _EXCLUSIVE[name]
            value = math.floor(value) + 1 if lower else math.ceil(value) - 1
        bound = _inward(value, lower, whole, place)
        found[name] = (max if lower else min)(bound, found.get(name, bound))
    lowest = max((value for name, value in found.items() if name in _LOWER), default=None)
    highest = min((value for name, value in found.items() if name not in _LOWER), default=None)
    if lowest is not None and highest is not None and lowest > highest:
        raise GrammarError(
            f"{path or 'the schema'} has bounds with no number between them that can be enforced exactly"
        )
    if highest is None and lowest is not None and float(lowest) >= _MOST_DIGITS:
        found["maximum"] = _LARGEST
    if lowest is None and highest is not None and float(highest) <= -_MOST_DIGITS:
        found["minimum"] = -_LARGEST
    return found


_LOWER = ("minimum", "exclusiveMinimum")
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _inward(value: int | float, lower: bool, whole: bool, path: str) -> int | float:
    """A bound that the matcher reads as `value`, or as the next number inside."""
    asked = value
    inside = math.inf if lower else -math.inf
    if (value > _LARGEST) if lower else (value < -_LARGEST):
        raise GrammarError(f"{path} must be within 64 bits, from {-_LARGEST} to {_LARGEST}, got {value}")
    if abs(value) > _LARGEST:
        if whole and value >= 2**63 - 1:
            # The matcher reads the end of 64 bits as such where only whole numbers may come.
            return 2**63 - 1
        value = -_LARGEST if lower else _LARGEST
    if 0 < abs(value) < _SMALLEST:
        value = (_SMALLEST if lower else 0) if value > 0 else 0 if lower else -_SMALLEST
    while True:
        read = _as_read(value)
        if read is not None and (_reaches(read, asked, whole) if lower else _reaches(asked, read, whole)):
            return value
        value = math.nextafter(float(value), inside)
        value = int(value) if value.is_integer() else value


def _reaches(high: int | float, low: int | float, whole: bool) -> bool:
    """True when `high` is at least `low`. The matcher bounds numbers that are not whole by their shortest digits."""
    return high >= low if whole else Decimal(repr(high)) >= Decimal(repr(low))
