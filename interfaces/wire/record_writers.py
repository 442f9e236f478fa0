"""Writers of dataclasses in messages: as the list of their fields' values, which msgpack can pack, or asks about again.

A declared column is the bytes of its numbers and no more: both sides know its type.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import numpy as np

from interfaces.wire.forms import Column, Triples, bytes_of, wire_dtype
from interfaces.wire.record_readers import wire_fields, wire_tag

_made: dict[type[Any], Callable[[Any], list[Any]]] = {}


def values_of(cls: type[Any]) -> Callable[[Any], list[Any]]:
    """Make the function that lists an object's field values, in wire order, after its class's tag if it has one. It
    raises TypeError for arrays of another kind.

    It is generated as code, field by field, as `record_readers.positional` is.
    """
    made = _made.get(cls)
    if made is None:
        hints = typing.get_type_hints(cls, include_extras=True)
        known = {}
        tag = wire_tag(cls)
        values = [] if tag is None else [repr(tag)]
        for i, field in enumerate(wire_fields(cls)):
            writer = _writer(hints[field.name])
            known[f"write{i}"] = writer
            values.append(f"value.{field.name}" if writer is None else f"write{i}(value.{field.name})")
        made = _made[cls] = eval(f"lambda value: [{', '.join(values)}]", known)
    return made


def _writer(hint: Any) -> Callable[[Any], Any] | None:
    """Make the writer of a column, or of one that may be missing; None for other types."""
    for choice in (hint, *typing.get_args(hint)):
        for mark in getattr(choice, "__metadata__", ()):
            if isinstance(mark, Column):
                return _array_writer(np.dtype(mark.dtype), ())
            if isinstance(mark, Triples):
                return _array_writer(np.dtype(np.int32), (3,))
    return None


def _array_writer(element: np.dtype[Any], row: tuple[int, ...]) -> Callable[[Any], Any]:
    """Make the writer of arrays with any number of rows of this shape."""
    dtype = wire_dtype(element)
    dimensions = 1 + len(row)

    def write(array: Any) -> Any:
        # Most are columns, of numbers of this machine's order.
        if type(array) is np.ndarray and array.dtype is dtype and array.ndim == dimensions == 1:
            return bytes_of(array)
        if array is None:
            return None
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{type(array).__name__} has no place on the wire where an array is declared")
        if array.dtype != dtype or array.ndim != dimensions or array.shape[1:] != row:
            found = f"an array of {array.dtype} and shape {array.shape}"
            raise TypeError(f"{found} has no place on the wire where {dtype} in {dimensions} dimensions is declared")
        return bytes_of(array)

    return write
