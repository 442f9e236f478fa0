"""The one codec of the system: declared types to msgpack bytes and back, strictly.

Messages between our processes: a dataclass decorated with `@message(tag)` is one msgpack array `[version, tag, field,
...]`, and nested dataclasses are arrays too. Where a field may hold one of several, each begins with its class's
`wire_tag`. Columns are the bytes of their numbers, other numpy arrays have msgpack-numpy's form. `encode` and `decode`
do these.

Everything else (contexts, outputs, results by request id): `msgpack_numpy_encoder` and `msgpack_numpy_decoder(type)`,
where dataclasses are maps by field name and large arrays may travel through shared memory.

msgspec writes messages, and checks everything that is read against its declared type (declared.py). `WireError` names
the path of the first field that is wrong; nothing else comes out of decoding, whatever the bytes. Knows no message and
no socket.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgpack
import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from interfaces.wire.declared import Forms, wire_name
from interfaces.wire.forms import F32 as F32
from interfaces.wire.forms import I8 as I8
from interfaces.wire.forms import I32 as I32
from interfaces.wire.forms import I64 as I64
from interfaces.wire.forms import (
    Column,
    InProcess,
    Triples,
    VersionError,
    WireError,
    check_dtype,
    inline_form,
    message_form,
    shared_form,
)
from interfaces.wire.forms import F32Matrix as F32Matrix
from interfaces.wire.forms import I32x3 as I32x3
from interfaces.wire.records import Form, positional, wire_error, wire_fields
from interfaces.wire.shared_memory import Segments, SharedMemoryArray

__all__ = [
    "F32",
    "I8",
    "I32",
    "I64",
    "PROTOCOL_VERSION",
    "Column",
    "F32Matrix",
    "I32x3",
    "InProcess",
    "Triples",
    "VersionError",
    "WireError",
    "decode",
    "encode",
    "message",
    "msgpack_numpy_decoder",
    "msgpack_numpy_encoder",
]

# First element of every message; a peer of another version is refused, because fields are positional.
PROTOCOL_VERSION = 21

# Bytes from which an array travels through shared memory, where that is on.
SHARED_MEMORY_THRESHOLD = 24_000_000

# First byte of a msgpack array of more than 15 elements.
_LONG_ARRAY = 0xDC

T = TypeVar("T")

_by_tag: dict[int, type] = {}
_tag_of: dict[type, int] = {}
_plain_of: dict[type[Any], Callable[[Any], Any]] = {}
_decoders: dict[tuple[int, bool], Callable[[bytes | memoryview], Any]] = {}


def message(tag: int) -> Callable[[type[T]], type[T]]:
    """Register a dataclass as a message with a number that never changes meaning within a protocol version."""

    def register(cls: type[T]) -> type[T]:
        if tag in _by_tag:
            raise TypeError(f"message tag {tag} is taken by {_by_tag[tag].__name__}")
        _by_tag[tag] = cls
        _tag_of[cls] = tag
        return cls

    return register


def encode(value: Any) -> bytes:
    """Return the bytes of a registered message. Raises TypeError for objects that have no place on the wire."""
    plain = _plain_of.get(type(value)) or _make_plain(type(value))
    try:
        return _write(plain(value))
    except (ValueError, OverflowError, RecursionError, AttributeError) as error:
        raise TypeError(f"no place on the wire: {error}") from None


def decode(data: bytes | memoryview, *, ipc_peer: bool = False) -> Any:
    """Return the message in `data`, of the class its tag names. Arrays are read-only views of it. Raises WireError.

    `ipc_peer` says that the bytes come from a process of this host and user: then arrays may be named that are in
    shared memory. They are not mapped here.
    """
    try:
        # An array of up to 15 elements has one byte before them, a longer one two more for its length.
        start = 1 if data[0] < _LONG_ARRAY else 3
        if data[start] != PROTOCOL_VERSION:
            raise _not_a_message(data)
        decoder = _decoders[data[start + 1], ipc_peer]
    except (KeyError, IndexError):
        decoder = _make_decoder(data, ipc_peer)
    return decoder(data)


class MsgpackNumpyEncoder:
    """`encoder(object) -> bytes`. Can be pickled; the copy has a book of its own.

    With `use_shared_memory` arrays from the threshold on are put into segments that belong to `segments`: take them
    after each call, and release them when the request they belong to has ended. What is never released goes with the
    encoder, and after a kill with the next sweep.
    """

    def __init__(self, use_shared_memory: bool = False, shared_memory_threshold: int = SHARED_MEMORY_THRESHOLD) -> None:
        self.use_shared_memory = use_shared_memory
        self.shared_memory_threshold = shared_memory_threshold
        self.segments = Segments()

    def __call__(self, value: Any) -> bytes:
        # A packer of its own each time: one that is kept would keep the memory of the largest object, too.
        return _packed(msgpack.Packer(default=self._plain), value)

    def __reduce__(self) -> tuple[Any, ...]:
        return MsgpackNumpyEncoder, (self.use_shared_memory, self.shared_memory_threshold)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type | SharedMemoryArray):
            return _named_fields(value.to_wire() if hasattr(value, "to_wire") else value)
        return _other(value)

    def _array(self, array: NDArray[Any]) -> dict[str, Any]:
        check_dtype(array.dtype)
        if self.use_shared_memory and array.nbytes >= self.shared_memory_threshold:
            segment = self.segments.share(array)
            if segment is not None:
                return shared_form(segment)
        return inline_form(array)


class MsgpackNumpyDecoder:
    """`decoder(bytes) -> object` of one declared type. Raises WireError. Can be pickled."""

    def __init__(self, type_: Any, copy: bool = True, *, ipc_peer: bool = False) -> None:
        self.type_ = type_
        self.copy = copy
        self.ipc_peer = ipc_peer
        form = Forms(positional=False, copy=copy, ipc_peer=ipc_peer).form(type_)
        self._decode = _decoder_of(form, getattr(type_, "__name__", ""))

    def __call__(self, data: bytes | memoryview) -> Any:
        return self._decode(data)

    def __reduce__(self) -> tuple[Any, ...]:
        return _decoder, (self.type_, self.copy, self.ipc_peer)


def msgpack_numpy_encoder(
    use_shared_memory: bool = False, shared_memory_threshold: int = SHARED_MEMORY_THRESHOLD
) -> MsgpackNumpyEncoder:
    """Make a callable that turns an object into bytes. TypeError for objects that have no place on the wire."""
    return MsgpackNumpyEncoder(use_shared_memory, shared_memory_threshold)


def msgpack_numpy_decoder(type_: Any, copy: bool = True, *, ipc_peer: bool = False) -> MsgpackNumpyDecoder:
    """Make a callable that turns bytes into an object of type `type_`. TypeError for a type that cannot be on the wire.

    `copy` makes arrays writable and independent; without it they are read-only views. `ipc_peer` says that the bytes
    come from a process of this host and user, whose segments of shared memory may be opened.
    """
    return MsgpackNumpyDecoder(type_, copy, ipc_peer=ipc_peer)


def _decoder(type_: Any, copy: bool, ipc_peer: bool) -> MsgpackNumpyDecoder:
    return MsgpackNumpyDecoder(type_, copy, ipc_peer=ipc_peer)


def _make_plain(cls: type[Any]) -> Callable[[Any], Any]:
    if _by_tag.get(_tag_of.get(cls, -1)) is not cls:
        raise TypeError(f"{cls.__name__} is not a message: decorate it with @message")
    plain = _message_form(cls, False).plain
    assert plain is not None
    _plain_of[cls] = plain
    return plain


def _message_form(cls: type[Any], ipc_peer: bool) -> Form:
    forms = Forms(positional=True, copy=False, ipc_peer=ipc_peer)
    return positional(cls, forms.fields(cls), (PROTOCOL_VERSION, _tag_of[cls]))


def _make_decoder(data: bytes | memoryview, ipc_peer: bool) -> Callable[[bytes | memoryview], Any]:
    """Make the decoder of a message of this kind. Raises WireError for anything else."""
    parts = _decode_anything(data)
    tag = parts[1] if type(parts) is list and len(parts) > 1 and parts[0] == PROTOCOL_VERSION else None
    if type(tag) is not int or (cls := _by_tag.get(tag)) is None:
        raise _not_a_message(data)
    made = _decoders[tag, ipc_peer] = _decoder_of(_message_form(cls, ipc_peer), cls.__name__)
    return made


def _not_a_message(data: bytes | memoryview) -> WireError:
    parts = _decode_anything(data)
    if type(parts) is not list or len(parts) < 2:
        return WireError("a message is an array [version, tag, fields...]")
    if parts[0] != PROTOCOL_VERSION:
        return VersionError(f"protocol version {str(parts[0])[:80]}, this process speaks {PROTOCOL_VERSION}")
    return WireError(f"unknown message tag {str(parts[1])[:80]}")


def _positional_plain(value: Any) -> Any:
    return message_form(value) if isinstance(value, np.ndarray) else _other(value)


def _other(value: Any) -> Any:
    """Turn one level of an object, neither array nor dataclass, into types that msgpack or this module knows."""
    if isinstance(value, SharedMemoryArray):
        return shared_form(value)
    if isinstance(value, BaseModel):
        return {"__pydantic__": True, "type": wire_name(type(value)), "data": value.model_dump()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, int):
        raise TypeError(f"the integer {value} has no place on the wire: it has more than 64 bits")
    if callable(value):
        raise TypeError(
            f"{value!r} cannot cross a process boundary: logits processors and other callables work only within the "
            "process that runs the pipeline"
        )
    raise TypeError(f"{type(value).__name__} has no place on the wire")


def _named_fields(value: Any) -> dict[str, Any]:
    cls = type(value)
    if not getattr(cls, "__tagged__", False):
        return {field.name: getattr(value, field.name) for field in wire_fields(cls)}
    form: dict[str, Any] = {"type": cls.__name__}
    for field in wire_fields(cls):
        item = getattr(value, field.name)
        if not _is_default(field, item):
            form[field.name] = item
    return form


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return type(value) is type(default) and not isinstance(value, np.ndarray) and value == default


def _packed(packer: Any, value: Any) -> bytes:
    try:
        return cast(bytes, packer.pack(value))
    except ValueError as error:
        raise TypeError(f"no place on the wire: {error}") from None


def _decoder_of(form: Form, root: str) -> Callable[[bytes | memoryview], Any]:
    """Make a decoder of values of one form. Its WireErrors begin with `root`."""
    unpack = msgspec.msgpack.Decoder(form.check).decode
    finish = form.finish

    def decode(data: bytes | memoryview) -> Any:
        try:
            checked = unpack(data)
            return checked if finish is None or checked is None else finish(checked)
        except WireError as error:
            raise error.within(root) from None
        except msgspec.ValidationError as error:
            raise wire_error(error, form.check).within(root) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"not msgpack: {error}", root) from None
        except TypeError as error:  # an element that a set cannot hold
            raise WireError(str(error), root) from None
        except RecursionError:
            raise WireError("nested too deeply", root) from None

    return decode


_decode_anything = _decoder_of(Form(Any), "")
_write = msgspec.msgpack.Encoder(enc_hook=_positional_plain).encode
