"""The vocabulary of the wire: its error, the annotations of fields, and the forms an array can have.

A column of a message, whose element type is declared, is the bytes of its numbers. Any other array is a map, in one of
three spellings: msgpack-numpy's (`nd`, `type`, `kind`, `shape`, `data` as bytes keys), which messages use; `__np__`
with `data`, `shape`, `dtype`, which `msgpack_numpy_encoder` writes; and `__shm__`, which names a segment of shared
memory. Every spelling can be read everywhere, except that `__shm__` must be allowed. Knows no dataclass and no message.

Reading msgpack-numpy's form is done here and not by its own decoder, because that one unpickles object arrays.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interfaces.wire.shared_memory import Shareable, SharedMemoryArray, SharedMemoryError

# Bytes up to which an array is copied: a view of it costs as much.
_SHORT = 65536

# Checks a value that msgpack gave and builds the declared value from it. Raises WireError.
Reader = Callable[[Any], Any]


class WireError(ValueError):
    """The bytes are not what was declared; the text names the path of the first wrong field and what is wrong."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem, path)
        self.problem = problem
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem

    def within(self, segment: str) -> WireError:
        """Return this error as seen from one level further out."""
        return WireError(self.problem, segment + self.path)


class VersionError(WireError):
    """The peer speaks another protocol version; the text has both."""


@dataclass(frozen=True)
class Column:
    """Annotation of a one-dimensional array field: its element type."""

    dtype: type[np.generic]


@dataclass(frozen=True)
class Triples:
    """Annotation of an int32[k, 3] array field."""


@dataclass(frozen=True)
class Matrix:
    """Annotation of a two-dimensional array field: its element type."""

    dtype: type[np.generic]


@dataclass(frozen=True)
class InProcess:
    """Annotation of a field whose value cannot leave its process: only None has a form on the wire."""


I64 = typing.Annotated[NDArray[np.int64], Column(np.int64)]
I32 = typing.Annotated[NDArray[np.int32], Column(np.int32)]
I8 = typing.Annotated[NDArray[np.int8], Column(np.int8)]
F32 = typing.Annotated[NDArray[np.float32], Column(np.float32)]
F32Matrix = typing.Annotated[NDArray[np.float32], Matrix(np.float32)]
I32x3 = typing.Annotated[NDArray[np.int32], Triples()]


def kind_of(value: object) -> str:
    """Name the kind of a value, for error messages."""
    return "nil" if value is None else type(value).__name__


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise TypeError for arrays whose elements are not plain numbers: pointers and records have no place on the
    wire."""
    if dtype.kind not in "iufbc":
        raise TypeError(f"arrays of dtype {dtype} have no place on the wire: only numbers do")


_spelled: dict[np.dtype[Any], str] = {}


def message_form(array: NDArray[Any]) -> dict[bytes, Any]:
    """Return msgpack-numpy's spelling of an array."""
    spelled = _spelled.get(array.dtype)
    if spelled is None:
        check_dtype(array.dtype)
        # numpy spells a dtype out anew each time it is asked.
        spelled = _spelled[array.dtype] = array.dtype.str
    return {
        b"nd": True,
        b"type": spelled,
        b"kind": b"",
        b"shape": array.shape,
        b"data": bytes_of(array),
    }


def inline_form(array: NDArray[Any]) -> dict[str, Any]:
    check_dtype(array.dtype)
    # A name like "float32" says nothing of the byte order.
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return {"__np__": True, "data": bytes_of(native), "shape": native.shape, "dtype": native.dtype.name}


def shared_form(array: SharedMemoryArray) -> dict[str, Any]:
    return {"__shm__": True, "name": array.name, "shape": array.shape, "dtype": array.dtype}


def is_array_form(form: object) -> bool:
    return type(form) is dict and (b"nd" in form or "__np__" in form or "__shm__" in form)


def read_array(form: Any, copy: bool, ipc_peer: bool) -> NDArray[Any]:
    """Return the array that `form` spells: writable and owned with `copy`, else a read-only view."""
    if type(form) is not dict:
        raise WireError(f"expected an array, got {kind_of(form)}")
    if "__shm__" in form:
        return _map_segment(read_placeholder(form, ipc_peer), copy)
    if b"nd" in form:
        array = _from_bytes(form.get(b"data"), form.get(b"shape"), form.get(b"type"), form[b"nd"])
    elif "__np__" in form:
        array = _from_bytes(form.get("data"), form.get("shape"), form.get("dtype"), form["__np__"])
    else:
        raise WireError("expected an array, got a map")
    return array.copy() if copy else array


def read_shareable(form: Any, ipc_peer: bool) -> Shareable:
    """Return the array or segment that `form` spells, without opening shared memory: a reader of the numbers maps
    it."""
    if type(form) is dict and "__shm__" in form:
        return read_placeholder(form, ipc_peer)
    return read_array(form, copy=False, ipc_peer=ipc_peer)


def read_placeholder(form: Any, ipc_peer: bool) -> SharedMemoryArray:
    """Return the segment that `form` names, unopened."""
    if type(form) is not dict or form.get("__shm__") is not True:
        raise WireError(f"expected an array in shared memory, got {kind_of(form)}")
    if not ipc_peer:
        raise WireError("an array in shared memory is accepted from peers on this host only")
    name = form.get("name")
    shape = form.get("shape")
    kind = form.get("dtype")
    if not isinstance(name, str):
        raise WireError("malformed array: the segment has no name")
    dtype = _dtype(kind)
    try:
        return SharedMemoryArray(name, _shape(shape), dtype.str)
    except ValueError as error:
        raise WireError(str(error)) from None


def wire_dtype(element: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a column's numbers on the wire: least significant byte first."""
    return np.dtype(element.str.replace(">", "<"))


def column_reader(dtype: np.dtype[Any], copy: bool, ipc_peer: bool) -> Reader:
    """Make a reader of one-dimensional arrays of one element type."""

    def read(form: Any) -> NDArray[Any]:
        array = read_array(form, copy, ipc_peer)
        if array.dtype != dtype or array.ndim != 1:
            raise WireError(f"expected a column of {dtype}, got {array.dtype} of shape {array.shape}")
        return array

    return read


_INT32 = wire_dtype(np.dtype(np.int32))


def bare_column_reader(element: np.dtype[Any]) -> Reader:
    """Make a reader of the bytes of numbers: it returns a read-only view. ValueError when they are no whole numbers."""
    return functools.partial(np.frombuffer, dtype=wire_dtype(element))


def read_triples(data: bytes) -> NDArray[Any]:
    """Return the int32[k, 3] whose bytes these are."""
    numbers = np.frombuffer(data, _INT32)
    if len(numbers) % 3:
        raise WireError(f"expected triples of int32, got {len(numbers)} numbers")
    return numbers.reshape(-1, 3)


def column_writer(element: np.dtype[Any], row: tuple[int, ...] = ()) -> Callable[[Any], Any]:
    """Make a writer of arrays with any number of rows of this shape: as the bytes of their numbers and no more, because
    both sides know the type. It raises TypeError for anything else.
    """
    dtype = wire_dtype(element)
    dimensions = 1 + len(row)

    def write(array: Any) -> Any:
        # Most are short columns, of numbers of this machine's order.
        if type(array) is np.ndarray and array.dtype is dtype and array.shape[1:] == row and array.nbytes <= _SHORT:
            return array.tobytes()
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{type(array).__name__} has no place on the wire where an array is declared")
        if array.dtype != dtype or array.ndim != dimensions or array.shape[1:] != row:
            found = f"an array of {array.dtype} and shape {array.shape}"
            raise TypeError(f"{found} has no place on the wire where {dtype} in {dimensions} dimensions is declared")
        return bytes_of(array)

    return write


def matrix_reader(dtype: np.dtype[Any], copy: bool, ipc_peer: bool) -> Reader:
    def read(form: Any) -> NDArray[Any]:
        array = read_array(form, copy, ipc_peer)
        if array.dtype != dtype or array.ndim != 2:
            raise WireError(f"expected a matrix of {dtype}, got {array.dtype} of shape {array.shape}")
        return array

    return read


def bytes_of(array: NDArray[Any]) -> Any:
    # Large contiguous arrays are packed from where they are, without a copy in between.
    if array.nbytes > _SHORT and array.flags.c_contiguous:
        return array.data
    return array.tobytes()


def _from_bytes(data: Any, shape: Any, kind: Any, flag: Any) -> NDArray[Any]:
    if flag is not True or type(data) is not bytes:
        raise WireError("malformed array")
    dtype = _dtype(kind)
    sizes = _shape(shape)
    try:
        return np.frombuffer(data, dtype).reshape(sizes)
    except (ValueError, OverflowError) as error:
        raise WireError(f"malformed array: {error}") from None


def _shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"malformed array shape {str(shape)[:80]}")
    return tuple(shape)


def _dtype(kind: Any) -> np.dtype[Any]:
    if not isinstance(kind, str) or len(kind) > 16:
        raise WireError(f"unknown array type {str(kind)[:80]!r}")
    try:
        dtype: np.dtype[Any] = np.dtype(kind)
    except (TypeError, ValueError, SyntaxError):
        raise WireError(f"unknown array type {kind!r}") from None
    if dtype.kind not in "iufbc":
        raise WireError(f"array type {kind!r} is refused")
    return dtype


def _map_segment(placeholder: SharedMemoryArray, copy: bool) -> NDArray[Any]:
    try:
        return placeholder.open(writable=copy)
    except SharedMemoryError as error:
        raise WireError(str(error)) from None
