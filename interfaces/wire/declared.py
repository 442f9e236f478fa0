"""From a declared type to its form on the wire.

msgspec checks numbers, texts, enumerations, lists and maps; of what it has checked, functions make arrays, dataclasses
and pydantic objects, which are tagged maps. The declaration alone decides: a peer can name no class. Knows types; knows
no bytes.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from interfaces.wire.composites import any_of, container, one_of, optional, stateful, with_type
from interfaces.wire.forms import (
    Column,
    InProcess,
    Matrix,
    Reader,
    Triples,
    WireError,
    bare_column_reader,
    column_reader,
    column_writer,
    is_array_form,
    kind_of,
    matrix_reader,
    message_form,
    read_array,
    read_placeholder,
    read_shareable,
    read_triples,
    shared_form,
)
from interfaces.wire.records import (
    BUILD_ERRORS,
    Form,
    named,
    positional,
    wire_fields,
)
from interfaces.wire.shared_memory import SharedMemoryArray

# Levels of untyped data below which arrays are looked for.
_DEEPEST = 64

_CONTAINERS: dict[Any, type] = {
    list: list,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Iterable: list,
    set: set,
    frozenset: frozenset,
    collections.abc.Set: set,
    dict: dict,
    collections.abc.Mapping: dict,
    collections.abc.MutableMapping: dict,
    tuple: tuple,
}


def wire_name(cls: type[BaseModel]) -> str:
    """Return the name of a pydantic class on the wire."""
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclasses.dataclass(frozen=True)
class Forms:
    """Finds the wire's forms of declared types.

    `positional`: those of messages. `copy`: arrays are owned and writable. `ipc_peer`: shared memory may be named.
    """

    positional: bool
    copy: bool
    ipc_peer: bool

    def form(self, hint: Any) -> Form:
        """Return the form of a declared type. TypeError when the type has no place on the wire."""
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        kind = origin or hint
        if origin is typing.Annotated:
            return self._annotated(arguments)
        if isinstance(hint, TypeVar):
            bound = hint.__bound__
            return Form(Any) if bound is None or getattr(bound, "_is_protocol", False) else self.form(bound)
        if hint is Any or hint is object:
            return Form(Any)
        if origin in (types.UnionType, typing.Union):
            return self._union(arguments)
        if kind is collections.abc.Callable:
            return Form(None)
        if kind is np.ndarray:
            return Form(dict, self._array(arguments))
        if kind in _CONTAINERS:
            items = [self.form(item) for item in arguments if item is not Ellipsis]
            return container(_CONTAINERS[kind], items, same=len(items) != len(arguments) or not items)
        return Form(hint) if origin is typing.Literal else self._class(kind, arguments)

    def _annotated(self, arguments: tuple[Any, ...]) -> Form:
        for mark in arguments[1:]:
            match mark:
                case InProcess():
                    return Form(None)
                case Column() if self.positional:
                    dtype = np.dtype(mark.dtype)
                    return Form(bytes, bare_column_reader(dtype), column_writer(dtype))
                case Triples() if self.positional:
                    return Form(bytes, read_triples, column_writer(np.dtype(np.int32), (3,)))
                case Column():
                    return Form(dict, column_reader(np.dtype(mark.dtype), self.copy, self.ipc_peer))
                case Matrix():
                    return Form(dict, matrix_reader(np.dtype(mark.dtype), self.copy, self.ipc_peer))
        return self.form(arguments[0])

    def _class(self, cls: Any, arguments: tuple[Any, ...]) -> Form:
        if cls is None or cls in (type(None), int, float, bool, str, bytes):
            return Form(cls)
        if cls is SharedMemoryArray:
            return Form(dict, lambda value: read_placeholder(value, self.ipc_peer), shared_form)
        if typing.is_typeddict(cls):
            forms = {name: self.form(hint) for name, hint in typing.get_type_hints(cls).items()}
            return named(cls, forms, list(cls.__required_keys__), dict)
        if isinstance(cls, type):
            if hasattr(cls, "from_wire"):
                return stateful(cls, self.form(cls.wire_type))  # type: ignore[attr-defined]
            if dataclasses.is_dataclass(cls):
                return self._dataclass(cls, arguments)
            if issubclass(cls, BaseModel):
                return Form(dict, self._model(cls))
            if issubclass(cls, enum.Enum):
                return Form(cls)
            if issubclass(cls, str):
                return Form(str, cls)
        raise TypeError(f"{cls!r} has no place on the wire")

    def _union(self, arguments: tuple[Any, ...]) -> Form:
        inner = [a for a in arguments if a is not type(None)]
        if SharedMemoryArray in inner:
            form = Form(dict, self._shareable, _plain_shareable)
        elif self.positional and len(inner) > 1 and all(_is_record(a) for a in inner):
            form = one_of(inner, [self.form(a) for a in inner])
        else:
            form = any_of([self.form(a) for a in inner], writable=not self.positional)
        return form if len(inner) == len(arguments) else optional(form)

    def _shareable(self, value: Any) -> Any:
        """Read a shareable array: a message keeps its segment, a decoded object has its arrays mapped."""
        if self.positional:
            return read_shareable(value, self.ipc_peer)
        return read_array(value, self.copy, self.ipc_peer)

    def _array(self, arguments: tuple[Any, ...]) -> Reader:
        element = typing.get_args(arguments[1])[0] if len(arguments) == 2 and typing.get_args(arguments[1]) else Any
        element = typing.get_origin(element) or element
        wanted = element if isinstance(element, type) and issubclass(element, np.generic) else np.generic

        def read(value: Any) -> Any:
            array = read_array(value, self.copy, self.ipc_peer)
            if not issubclass(array.dtype.type, wanted):
                raise WireError(f"expected an array of {wanted.__name__}, got {array.dtype}")
            return array

        return read

    def _dataclass(self, cls: type[Any], arguments: tuple[Any, ...]) -> Form:
        forms = self.fields(cls, arguments)
        if self.positional:
            return positional(cls, forms)
        missing = dataclasses.MISSING
        required = [f.name for f in wire_fields(cls) if f.default is missing and f.default_factory is missing]
        form = named(cls, forms, required, cls)
        return form if "type" in forms else with_type(cls, form)

    def fields(self, cls: type[Any], arguments: tuple[Any, ...] = ()) -> dict[str, Form]:
        """Return the forms of a dataclass's fields; `arguments` are those of a generic class."""
        hints = typing.get_type_hints(cls, include_extras=True)
        chosen = dict(zip(getattr(cls, "__parameters__", ()), arguments, strict=False))
        return {field.name: self.form(_substituted(hints[field.name], chosen)) for field in wire_fields(cls)}

    def _model(self, cls: type[BaseModel]) -> Reader:
        classes = {wire_name(c): c for c in (cls, *_descendants(cls))}

        def read(value: Any) -> Any:
            if type(value) is not dict or value.get("__pydantic__") is not True or len(value) != 3:
                raise WireError(f"expected a {cls.__name__}, got {kind_of(value)}")
            named = value.get("type")
            found = classes.get(named) if isinstance(named, str) else None
            if found is None:
                raise WireError(f"expected a {cls.__name__}, got a pydantic object of type {str(named)[:80]!r}")
            try:
                return found.model_validate(self._restored(value.get("data"), 0))
            except ValidationError as error:
                first = error.errors(include_url=False, include_context=False)[0]
                path = "".join(f".{part}" for part in first["loc"])
                raise WireError(first["msg"], path) from None
            except WireError:
                raise
            except BUILD_ERRORS as error:
                raise WireError(str(error)) from None

        return read

    def _restored(self, value: Any, depth: int) -> Any:
        """Return `value` with its arrays: pydantic takes them as they are."""
        if depth > _DEEPEST:
            raise WireError(f"nested deeper than {_DEEPEST} levels")
        if is_array_form(value):
            return read_array(value, self.copy, self.ipc_peer)
        if type(value) is dict:
            return {key: self._restored(item, depth + 1) for key, item in value.items()}
        if type(value) is list:
            return [self._restored(item, depth + 1) for item in value]
        return value


def _plain_shareable(value: Any) -> Any:
    return shared_form(value) if isinstance(value, SharedMemoryArray) else message_form(value)


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint) and not hasattr(hint, "from_wire")


def _substituted(hint: Any, chosen: Mapping[Any, Any]) -> Any:
    if isinstance(hint, TypeVar):
        return chosen.get(hint, hint)
    parameters = getattr(hint, "__parameters__", ())
    return hint[tuple(chosen.get(p, p) for p in parameters)] if chosen and parameters else hint


def _descendants(cls: type[BaseModel]) -> Iterable[type[BaseModel]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)
