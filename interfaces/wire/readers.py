"""From a declared type to the code that checks and builds its values from what msgpack gives.

Two forms. Positional: a dataclass is the list of its fields' values (messages). Named: it is a map by field name, as
`msgpack_numpy_encoder` writes it. Pydantic objects are tagged maps in both. The declaration alone decides: a peer can
name no class. Knows types; knows no bytes.
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

from interfaces.wire.forms import (
    Column,
    InProcess,
    Matrix,
    Reader,
    Triples,
    WireError,
    bare_column_reader,
    bare_triples_reader,
    column_reader,
    is_array_form,
    kind_of,
    matrix_reader,
    read_array,
    read_placeholder,
    read_shareable,
)
from interfaces.wire.leaf_readers import (
    anything,
    enumeration,
    exact_type,
    literal,
    nil,
    nothing,
    or_none,
    scalar,
    text,
    within,
)
from interfaces.wire.record_readers import BUILD_ERRORS, check_names, named, positional, wire_fields, wire_tag
from interfaces.wire.shared_memory import SharedMemoryArray

# Levels of untyped data below which arrays are looked for.
_DEEPEST = 64

_LISTS = (list, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Iterable)
_MAPS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SETS = (set, frozenset, collections.abc.Set)


def wire_name(cls: type[BaseModel]) -> str:
    """Return the name of a pydantic class on the wire."""
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclasses.dataclass(frozen=True)
class Readers:
    """Makes readers of one form. `copy`: arrays are owned and writable. `ipc_peer`: shared memory may be named."""

    positional: bool
    copy: bool
    ipc_peer: bool

    def reader(self, hint: Any) -> Reader:
        """Make the reader of a declared type. TypeError when the type has no place on the wire."""
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin is typing.Annotated:
            return self._annotated(arguments)
        if isinstance(hint, TypeVar):
            bound = hint.__bound__
            return anything if bound is None or getattr(bound, "_is_protocol", False) else self.reader(bound)
        if hint is Any or hint is object:
            return anything
        if origin in (types.UnionType, typing.Union):
            return self._union(arguments)
        if origin is typing.Literal:
            return literal(arguments)
        if (origin or hint) is np.ndarray:
            return self._array(arguments)
        if (origin or hint) is collections.abc.Callable:
            return nothing
        container = self._container(origin or hint, arguments)
        return container if container is not None else self._class(hint, origin, arguments)

    def _annotated(self, arguments: tuple[Any, ...]) -> Reader:
        for mark in arguments[1:]:
            match mark:
                case InProcess():
                    return nothing
                case Column() if self.positional:
                    return bare_column_reader(np.dtype(mark.dtype))
                case Column():
                    return column_reader(np.dtype(mark.dtype), self.copy, self.ipc_peer)
                case Matrix():
                    return matrix_reader(np.dtype(mark.dtype), self.copy, self.ipc_peer)
                case Triples() if self.positional:
                    return bare_triples_reader()
        return self.reader(arguments[0])

    def _container(self, kind: Any, arguments: tuple[Any, ...]) -> Reader | None:
        if kind in _LISTS:
            return self._items(list, arguments[0] if arguments else Any)
        if kind in _SETS:
            return self._items(frozenset if kind is frozenset else set, arguments[0] if arguments else Any)
        if kind in _MAPS:
            return self._map(*(arguments or (Any, Any)))
        if kind is tuple:
            if not arguments or arguments[-1] is Ellipsis:
                return self._items(tuple, arguments[0] if arguments else Any)
            return self._tuple(arguments)
        return None

    def _class(self, hint: Any, origin: Any, arguments: tuple[Any, ...]) -> Reader:
        cls = origin or hint
        if cls is SharedMemoryArray:
            return lambda value: read_placeholder(value, self.ipc_peer)
        if hint is None or hint is type(None):
            return nil
        if typing.is_typeddict(cls):
            return self._typed_dict(cls)
        if isinstance(cls, type):
            if hasattr(cls, "from_wire"):
                return self._stateful(cls)
            if dataclasses.is_dataclass(cls):
                return self._dataclass(cls, arguments)
            if issubclass(cls, BaseModel):
                return self._model(cls)
            if issubclass(cls, enum.Enum):
                return enumeration(cls)
            if cls in (int, float, bool, str, bytes):
                return scalar(cls)
            if issubclass(cls, str):
                return text(cls)
        raise TypeError(f"{hint!r} has no place on the wire")

    def _union(self, arguments: tuple[Any, ...]) -> Reader:
        inner = [a for a in arguments if a is not type(None)]
        if SharedMemoryArray in inner:
            return self._shareable(arguments)
        if self.positional and len(inner) > 1 and all(_is_record(a) for a in inner):
            return self._one_of(inner, optional=len(inner) < len(arguments))
        readers = [self.reader(a) for a in inner]
        optional = len(inner) < len(arguments)
        if len(readers) == 1:
            return or_none(readers[0])

        def read(value: Any) -> Any:
            if value is None and optional:
                return None
            problems: list[str] = []
            for reader in readers:
                try:
                    return reader(value)
                except WireError as error:
                    problems.append(str(error))
            raise WireError(f"fits none of the declared types ({'; '.join(problems)})")

        return read

    def _shareable(self, arguments: tuple[Any, ...]) -> Reader:
        """Make a reader of a shareable array: a message keeps its segment, a decoded object has its arrays mapped."""
        optional = type(None) in arguments

        def read(value: Any) -> Any:
            if value is None and optional:
                return None
            if self.positional:
                return read_shareable(value, self.ipc_peer)
            return read_array(value, self.copy, self.ipc_peer)

        return read

    def _one_of(self, classes: list[type[Any]], optional: bool) -> Reader:
        """Make a reader of one of several dataclasses: the first element of each one's list is its tag."""
        readers = {wire_tag(cls): self.reader(cls) for cls in classes}
        names = ", ".join(cls.__name__ for cls in classes)
        if len(readers) < len(classes) or None in readers:
            raise TypeError(f"{names} need a wire_tag each, all different: on the wire nothing else distinguishes them")

        def read(value: Any) -> Any:
            if value is None and optional:
                return None
            tag = value[0] if type(value) is list and value else None
            reader = readers.get(tag) if type(tag) is str else None
            if reader is None:
                raise WireError(f"expected the tag and the fields of one of {names}")
            return reader(value)

        return read

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

    def _items(self, kind: type, element: Any) -> Reader:
        reader = self.reader(element)
        exact = exact_type(reader)

        def read(value: Any) -> Any:
            if type(value) is not list:
                raise WireError(f"expected a list, got {kind_of(value)}")
            if not value:
                return kind()
            try:
                items = [item if type(item) is exact else reader(item) for item in value]
                return items if kind is list else kind(items)
            except WireError as error:
                i, inner = _first_failure(value, reader)
                raise (inner or error).within(f"[{i}]") from None
            except TypeError as error:
                raise WireError(str(error)) from None

        return read

    def _tuple(self, elements: tuple[Any, ...]) -> Reader:
        readers = [self.reader(element) for element in elements]

        def read(value: Any) -> Any:
            if type(value) is not list or len(value) != len(readers):
                raise WireError(f"expected a list of {len(readers)} elements")
            return tuple(within(f"[{i}]", r, item) for i, (r, item) in enumerate(zip(readers, value, strict=True)))

        return read

    def _map(self, key: Any, element: Any) -> Reader:
        read_key = self.reader(key)
        read_element = self.reader(element)

        def read(value: Any) -> Any:
            if type(value) is not dict:
                raise WireError(f"expected a map, got {kind_of(value)}")
            if not value:
                return value
            return {within(" key", read_key, k): within(f"[{k!r}]", read_element, v) for k, v in value.items()}

        return read

    def _typed_dict(self, cls: Any) -> Reader:
        readers = {name: self.reader(hint) for name, hint in typing.get_type_hints(cls).items()}
        required = cls.__required_keys__

        def read(value: Any) -> Any:
            check_names(value, readers, required, cls.__name__)
            return {name: within(f".{name}", readers[name], item) for name, item in value.items()}

        return read

    def _stateful(self, cls: Any) -> Reader:
        state_reader = self.reader(cls.wire_type)

        def read(value: Any) -> Any:
            state = state_reader(value)
            try:
                return cls.from_wire(state)
            except WireError:
                raise
            except BUILD_ERRORS as error:
                raise WireError(str(error)) from None

        return read

    def _dataclass(self, cls: type[Any], arguments: tuple[Any, ...]) -> Reader:
        make = positional if self.positional else named
        made: Reader | None = None

        def read(value: Any) -> Any:
            nonlocal made
            if made is None:  # until the first value comes, so that types may name themselves
                made = make(cls, self._field_readers(cls, arguments))
            return made(value)

        return read

    def _field_readers(self, cls: type[Any], arguments: tuple[Any, ...]) -> dict[str, Reader]:
        hints = typing.get_type_hints(cls, include_extras=True)
        chosen = dict(zip(getattr(cls, "__parameters__", ()), arguments, strict=False))
        return {field.name: self.reader(_substituted(hints[field.name], chosen)) for field in wire_fields(cls)}

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


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint) and not hasattr(hint, "from_wire")


def _first_failure(values: list[Any], reader: Reader) -> tuple[int, WireError | None]:
    for i, item in enumerate(values):
        try:
            reader(item)
        except WireError as error:
            return i, error
    return len(values), None


def _substituted(hint: Any, chosen: Mapping[Any, Any]) -> Any:
    if isinstance(hint, TypeVar):
        return chosen.get(hint, hint)
    parameters = getattr(hint, "__parameters__", ())
    return hint[tuple(chosen.get(p, p) for p in parameters)] if chosen and parameters else hint


def _descendants(cls: type[BaseModel]) -> Iterable[type[BaseModel]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)
