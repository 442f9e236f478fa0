"""Readers of dataclasses: as the list of their fields' values, or as a map by field name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from interfaces.wire.forms import Reader, WireError, kind_of
from interfaces.wire.leaf_readers import exact_type, of_values, within

# Errors that a constructor may raise for values that have the right types.
BUILD_ERRORS = (ValueError, TypeError, AssertionError, OverflowError, RuntimeError)

_wire_fields: dict[type[Any], tuple[dataclasses.Field[Any], ...]] = {}


def wire_fields(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields that travel, in wire order: those the constructor takes, unless marked `metadata={"wire":
    False}`."""
    found = _wire_fields.get(cls)
    if found is None:
        found = tuple(f for f in dataclasses.fields(cls) if f.init and f.metadata.get("wire", True))
        _wire_fields[cls] = found
    return found


def wire_tag(cls: type[Any]) -> str | None:
    """Return the tag before a class's fields in a message, by which it is told from others; None where it has none."""
    tag: str | None = getattr(cls, "wire_tag", None)
    return tag


def positional(cls: type[Any], readers: Mapping[str, Reader]) -> Reader:
    """Make a reader of a list of the fields' values, after the class's tag if it has one.

    Each field is a line of code, as dataclasses make their constructors: every message is read here, and a loop over
    the fields takes twice as long.
    """
    fields = wire_fields(cls)
    items = [f"item{i}" for i in range(len(fields))]
    tag = wire_tag(cls)
    places = items if tag is None else ["tag", *items]
    named_ones = any(field.kw_only for field in fields)
    given = [f"{field.name}={item}" if named_ones else item for field, item in zip(fields, items, strict=True)]
    code = [
        "def read(value):",
        f"    if type(value) is not list or len(value) != {len(places)}:",
        f"        raise WireError('expected an array of {len(places)} fields')",
        f"    [{', '.join(places)}] = value",
        *([] if tag is None else [f"    if tag != {tag!r}:", "        raise WireError('expected another tag')"]),
        "    try:",
    ]
    for item, field in zip(items, fields, strict=True):
        unless_none = "" if of_values(readers[field.name]) is None else f"{item} is not None and "
        code.append(f"        if {unless_none}type({item}) is not type_{item}:")
        code.append(f"            {item} = read_{item}({item})")
    code += [
        f"        return cls({', '.join(given)})",
        "    except WireError as error:",
        "        raise where(value, error) from None",
        "    except BUILD_ERRORS as error:",
        "        raise WireError(str(error)) from None",
    ]

    def where(value: list[Any], error: WireError) -> WireError:
        """Return the error of the first field that is wrong, with its name; the constructor's own, if all are right."""
        given = value if tag is None else value[1:]
        for (name, reader), item in zip(readers.items(), given, strict=True):
            try:
                within(f".{name}", reader, item)
            except WireError as found:
                return found
        return error

    known: dict[str, Any] = {"cls": cls, "where": where, "WireError": WireError, "BUILD_ERRORS": BUILD_ERRORS}
    for item, field in zip(items, fields, strict=True):
        reader = readers[field.name]
        known |= {f"read_{item}": of_values(reader) or reader, f"type_{item}": exact_type(reader)}
    exec("\n".join(code), known)
    made: Reader = known["read"]
    return made


def named(cls: type[Any], readers: Mapping[str, Reader]) -> Reader:
    """Make a reader of a map by field name; fields with a default may be missing."""
    missing = dataclasses.MISSING
    required = [f.name for f in wire_fields(cls) if f.default is missing and f.default_factory is missing]
    tagged = getattr(cls, "__tagged__", False)

    def read(value: Any) -> Any:
        if type(value) is dict and "type" in value and "type" not in readers:
            if tagged and value["type"] != cls.__name__:
                raise WireError(f"expected a {cls.__name__}, got a {str(value['type'])[:80]!r}")
            value = {name: item for name, item in value.items() if name != "type"}
        check_names(value, readers, required, cls.__name__)
        arguments = {name: within(f".{name}", readers[name], item) for name, item in value.items()}
        try:
            return cls(**arguments)
        except BUILD_ERRORS as error:
            raise WireError(str(error)) from None

    return read


def check_names(value: Any, known: Mapping[str, Any], required: Iterable[str], what: str) -> None:
    """Raise WireError unless the value is a map of known names with all that are required."""
    if type(value) is not dict:
        raise WireError(f"expected a {what}, got {kind_of(value)}")
    for name in value:
        if name not in known:
            raise WireError(f"{str(name)[:80]!r} is no field of {what}")
    for name in required:
        if name not in value:
            raise WireError(f"missing, and {what} must have it", f".{name}")
