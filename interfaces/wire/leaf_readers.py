"""Readers of values that contain no others: numbers, texts, enumerations, nothing at all."""

from __future__ import annotations

import enum
from typing import Any
from weakref import WeakKeyDictionary

from interfaces.wire.forms import Reader, WireError, kind_of


class _NoType:
    """The type hint of None."""


_exact_types: WeakKeyDictionary[Reader, type] = WeakKeyDictionary()
_of_values: WeakKeyDictionary[Reader, Reader] = WeakKeyDictionary()


def exact_type(reader: Reader) -> type:
    """Return the type whose values `reader` gives back as they are, so that it need not be called for them."""
    return _exact_types.get(reader, _NoType)


def within(segment: str, reader: Reader, value: Any) -> Any:
    """Read a value with `reader`; `segment` is its place, for the error."""
    try:
        return reader(value)
    except WireError as error:
        raise error.within(segment) from None


def anything(value: Any) -> Any:
    return value


def nil(value: Any) -> None:
    if value is not None:
        raise WireError(f"expected nil, got {kind_of(value)}")


def nothing(value: Any) -> None:
    if value is not None:
        raise WireError("must be nil, because it cannot cross a process boundary")


def scalar(cls: type) -> Reader:
    """Make a reader of a number, a text or bytes; a float may have been written as an integer."""

    def read(value: Any) -> Any:
        if type(value) is cls:
            return value
        if cls is float and type(value) is int:
            return float(value)
        raise WireError(f"expected {cls.__name__}, got {kind_of(value)}")

    _exact_types[read] = cls
    return read


def or_none(reader: Reader) -> Reader:
    """Make a reader that also takes None."""

    def read(value: Any) -> Any:
        return None if value is None else reader(value)

    _exact_types[read] = exact_type(reader)
    _of_values[read] = reader
    return read


def of_values(reader: Reader) -> Reader | None:
    """Return the reader of all values but None, where `reader` takes None as it is."""
    return _of_values.get(reader)


def text(cls: type[str]) -> Reader:
    """Make a reader of a str subclass."""

    def read(value: Any) -> Any:
        if type(value) is not str:
            raise WireError(f"expected str, got {kind_of(value)}")
        return cls(value)

    return read


def enumeration(cls: type[enum.Enum]) -> Reader:
    """Make a reader of an enumeration's members, by value."""

    def read(value: Any) -> Any:
        try:
            return cls(value)
        except ValueError:
            raise WireError(f"{str(value)[:80]!r} is not a {cls.__name__}") from None

    return read


def literal(allowed: tuple[Any, ...]) -> Reader:
    """Make a reader of one of these values, of the very type: True is not 1."""

    def read(value: Any) -> Any:
        for item in allowed:
            if type(item) is type(value) and item == value:
                return value
        raise WireError(f"{str(value)[:80]!r} is none of {', '.join(map(repr, allowed))}")

    return read
