"""The one codec of the system: dataclasses to msgpack bytes and back, strictly.

A message class is a dataclass decorated with `@message(tag)`. On the wire it is one msgpack array `[version, tag,
field, ...]`; nested dataclasses are positional arrays too, and numpy arrays take msgpack-numpy's form. Decoding checks
every value against the declared type and raises `WireError` with the path of the first field that is wrong; nothing
else can come out of `decode`, whatever the bytes. It knows no message and no socket.

Reading msgpack-numpy's array form is done here and not by its own decoder, because that one unpickles object arrays.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgpack
import msgpack_numpy
import numpy as np
from numpy.typing import NDArray

PROTOCOL_VERSION = 1
"""First element of every message; a peer of another version is refused, because fields are positional."""

T = TypeVar("T")
Checker = Callable[[Any, str], Any]


class WireError(ValueError):
    """The bytes are not a message of this protocol; the text names the field's path and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Column:
    """Annotation of a one-dimensional array field: its element type."""

    dtype: type[np.generic]


I32 = typing.Annotated[NDArray[np.int32], Column(np.int32)]
I8 = typing.Annotated[NDArray[np.int8], Column(np.int8)]
F32 = typing.Annotated[NDArray[np.float32], Column(np.float32)]


@dataclasses.dataclass(frozen=True)
class Triples:
    """Annotation of an int32[k, 3] array field."""


I32x3 = typing.Annotated[NDArray[np.int32], Triples()]


@dataclasses.dataclass(frozen=True)
class InProcess:
    """Annotation of a field whose value cannot leave its process: only None has a form on the wire."""


_by_tag: dict[int, type] = {}
_tag_of: dict[type, int] = {}


def message(tag: int) -> Callable[[type[T]], type[T]]:
    """Registers a dataclass as a message with a number that never changes meaning within a protocol version."""

    def register(cls: type[T]) -> type[T]:
        if tag in _by_tag:
            raise TypeError(f"message tag {tag} is taken by {_by_tag[tag].__name__}")
        _by_tag[tag] = cls
        _tag_of[cls] = tag
        return cls

    return register


def encode(value: Any) -> bytes:
    """Bytes of a registered message. Raises TypeError for objects that have no place on the wire."""
    tag = _tag_of.get(type(value))
    if tag is None:
        raise TypeError(f"{type(value).__name__} is not a message: decorate it with @message")
    return cast(bytes, msgpack.packb([PROTOCOL_VERSION, tag, *_fields(value)], default=_plain))


def decode(data: bytes | memoryview) -> Any:
    """The message in `data`, of the class its tag names. Arrays are read-only views of `data`. Raises WireError."""
    try:
        parts = msgpack.unpackb(data, strict_map_key=False, object_hook=_read_array)
    except WireError:
        raise
    except Exception as error:  # the unpacker's own errors have no common base
        raise WireError(f"not msgpack: {error}") from None
    if not isinstance(parts, list) or len(parts) < 2:
        raise WireError("a message is an array [version, tag, fields...]")
    if parts[0] != PROTOCOL_VERSION:
        raise WireError(f"protocol version {parts[0]!r}, this process speaks {PROTOCOL_VERSION}")
    cls = _by_tag.get(parts[1]) if isinstance(parts[1], int) else None
    if cls is None:
        raise WireError(f"unknown message tag {parts[1]!r}")
    return _dataclass_checker(cls)(parts[2:], cls.__name__)


def _fields(value: Any) -> list[Any]:
    return [getattr(value, name) for name in _field_names(type(value))]


_names_of: dict[type, tuple[str, ...]] = {}


def _field_names(cls: type[Any]) -> tuple[str, ...]:
    names = _names_of.get(cls)
    if names is None:
        names = _names_of[cls] = tuple(field.name for field in dataclasses.fields(cls))
    return names


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iufb":
            raise TypeError(f"arrays of dtype {value.dtype} have no place on the wire")
        return msgpack_numpy.encode(np.ascontiguousarray(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, np.generic):
        return value.item()
    if callable(value):
        raise TypeError(
            f"{value!r} cannot cross a process boundary: logits processors and other callables work only within the "
            "process that runs the pipeline"
        )
    raise TypeError(f"{type(value).__name__} has no place on the wire")


def _read_array(form: dict[Any, Any]) -> Any:
    if b"nd" not in form:
        return form
    shape, kind, data = form.get(b"shape"), form.get(b"type"), form.get(b"data")
    if form[b"nd"] is not True or not isinstance(kind, str) or not isinstance(data, bytes):
        raise WireError("malformed array")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"malformed array shape {shape!r}")
    try:
        dtype = np.dtype(kind)
    except TypeError:
        raise WireError(f"unknown array type {kind!r}") from None
    if dtype.kind not in "iufb":
        raise WireError(f"array type {kind!r} is refused")
    try:
        return np.frombuffer(data, dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise WireError(f"malformed array: {error}") from None


def _checker(hint: Any) -> Checker:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _nothing if isinstance(arguments[1], InProcess) else _array_checker(arguments[1])
    if origin in (types.UnionType, typing.Union):
        return _optional_checker(arguments)
    if origin in (list, tuple):
        return _sequence_checker(origin, arguments[0])
    if origin is dict:
        return _dict_checker(*arguments)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass_checker(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_checker(hint)
    return _scalar_checker(hint)


def _scalar_checker(hint: type) -> Checker:
    if hint not in (int, float, bool, str, bytes):
        raise TypeError(f"{hint!r} cannot be a field of a message")

    def check(value: Any, path: str) -> Any:
        if type(value) is hint:
            return value
        if hint is float and type(value) is int:
            return float(value)
        raise WireError(f"{path}: expected {hint.__name__}, got {type(value).__name__}")

    return check


def _nothing(value: Any, path: str) -> None:
    if value is not None:
        raise WireError(f"{path}: must be nil, because it cannot cross a process boundary")


def _array_checker(spec: Column | Triples) -> Checker:
    dtype = np.dtype(np.int32) if isinstance(spec, Triples) else np.dtype(spec.dtype)

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype != dtype:
            raise WireError(
                f"{path}: expected an array of {dtype}, got {getattr(value, 'dtype', type(value).__name__)}"
            )
        shaped = value.ndim == 1 if isinstance(spec, Column) else value.ndim == 2 and value.shape[1] == 3
        if not shaped:
            raise WireError(f"{path}: array of shape {value.shape} has the wrong shape")
        return value

    return check


def _optional_checker(arguments: tuple[Any, ...]) -> Checker:
    inner = [a for a in arguments if a is not type(None)]
    if len(inner) != 1 or len(arguments) != 2:
        raise TypeError("a message field may be T or T | None, no other union")
    check_inner = _checker(inner[0])
    return lambda value, path: None if value is None else check_inner(value, path)


def _sequence_checker(kind: type, element: Any) -> Checker:
    check_element = _checker(element)

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise WireError(f"{path}: expected a list, got {type(value).__name__}")
        return kind(check_element(item, f"{path}[{i}]") for i, item in enumerate(value))

    return check


def _dict_checker(key: Any, element: Any) -> Checker:
    check_key, check_element = _checker(key), _checker(element)

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise WireError(f"{path}: expected a map, got {type(value).__name__}")
        return {check_key(k, f"{path} key"): check_element(v, f"{path}[{k!r}]") for k, v in value.items()}

    return check


def _enum_checker(hint: type[enum.Enum]) -> Checker:
    def check(value: Any, path: str) -> Any:
        try:
            return hint(value)
        except ValueError:
            raise WireError(f"{path}: {value!r} is not a {hint.__name__}") from None

    return check


_checker_of: dict[type, Checker] = {}


def _dataclass_checker(cls: type[Any]) -> Checker:
    if cls not in _checker_of:
        _checker_of[cls] = _compile_dataclass(cls)
    return _checker_of[cls]


def _compile_dataclass(cls: type[Any]) -> Checker:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = _field_names(cls)
    checkers = [(name, _checker(hints[name])) for name in names]

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, list) or len(value) != len(names):
            raise WireError(f"{path}: expected an array of {len(names)} fields")
        arguments = [check(item, f"{path}.{name}") for (name, check), item in zip(checkers, value, strict=True)]
        try:
            return cls(*arguments)
        except ValueError as error:
            raise WireError(f"{path}: {error}") from None

    return check
