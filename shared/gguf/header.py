"""Parses the head of one GGUF file: its metadata, and where its tensors are.

Every count, length and offset is compared with the size of the file before anything is made of it, so that a file that
lies costs no more memory than its own size.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.gguf.blocks import package_decodes
from shared.gguf.format import (
    ALIGNMENT,
    ARRAY,
    BOOL,
    MAGIC,
    MOST_DIMENSIONS,
    NUMBERS,
    OTHER_TYPES,
    PACKAGE_TYPES,
    STRING,
    TYPES,
    VERSIONS,
    BlockType,
    GgufError,
    damaged,
)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# The least bytes of an entry of the metadata (a key's length, its type, a byte), and of the table of tensors.
_LEAST_ENTRY = 13
_LEAST_TENSOR = 32
# Real names have up to 64 bytes.
_LONGEST_NAME = 1 << 10
_MOST_ALIGNMENT = 1 << 20
# How the text begins that git keeps in place of a large file.
_POINTER = b"version https://git-lfs"


class Texts(NamedTuple):
    """An array of texts, decoded when it is asked for."""

    data: memoryview
    begin: int
    length: int

    def read(self) -> list[str]:
        """Return the texts. UnicodeDecodeError for one that is not UTF-8."""
        found = []
        place = self.begin
        for _ in range(self.length):
            (length,) = _U64.unpack_from(self.data, place)
            place += 8 + length
            found.append(str(self.data[place - length : place], "utf-8"))
        return found


class TensorEntry(NamedTuple):
    """A tensor of one file: `shape` has the outputs first and the inputs last."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # [rows, bytes of a row], mapped


class Header(NamedTuple):
    """What the head of one file says. Numbers of metadata are Python's, arrays of them numpy's."""

    path: str
    metadata: dict[str, Any]
    tensors: list[TensorEntry]


def read_header(path: str | Path) -> Header:
    """Map a file and parse its head. GgufError says what is wrong with it; OSError that it cannot be opened."""
    with Path(path).open("rb") as file:
        begin = file.read(len(_POINTER))
        if begin == _POINTER:
            raise GgufError(f"{path}: it is a pointer of git-lfs and not the file: run `git lfs pull` in its folder")
        if not begin.startswith(MAGIC):
            raise GgufError(f"{path}: it begins with {begin[:4]!r} and not with 'GGUF': name a GGUF file")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return _Parser(str(path), memoryview(mapped)).header()


class _Parser:
    def __init__(self, path: str, data: memoryview) -> None:
        self._path = path
        self._data = data
        self._place = len(MAGIC)

    def header(self) -> Header:
        version = self._u32("version")
        if version not in VERSIONS:
            raise GgufError(
                f"{self._path}: version is {version if version < 1 << 16 else 'that of a big-endian file'}, "
                "and 2 and 3 can be read: convert the model again with today's llama.cpp"
            )
        num_tensors = self._count("the number of tensors", _LEAST_TENSOR)
        metadata = self._metadata(self._count("the number of metadata entries", _LEAST_ENTRY))
        entries = [self._entry(number) for number in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        valid = isinstance(alignment, int) and 0 < alignment <= _MOST_ALIGNMENT and not alignment & (alignment - 1)
        if not valid:
            raise damaged(self._path, f"general.alignment is {alignment!r}, no power of two")
        self._place += -self._place % alignment
        return Header(self._path, metadata, self._tensors(entries, alignment))

    def _metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(count):
            key = self._text(f"key {number} of the metadata", _LONGEST_NAME)
            if key in found:
                raise damaged(self._path, f"the metadata has {key} twice")
            found[key] = self._value(key, self._u32(f"the type of {key}"))
        return found

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._text(key)
        if kind == ARRAY:
            return self._array(key)
        value = self._numbers(key, kind, 1)[0]
        return bool(value) if kind == BOOL else value.item()

    def _array(self, key: str) -> Any:
        kind = self._u32(f"the type of {key}")
        if kind != STRING:
            return self._numbers(key, kind, self._count(f"the length of {key}", 1))
        count = self._count(f"the length of {key}", 8)
        begin = self._place
        end = len(self._data)
        place = begin
        for number in range(count):
            if place + 8 > end:
                raise damaged(self._path, f"{key} ends after {number} of its {count} texts")
            (length,) = _U64.unpack_from(self._data, place)
            place += 8 + length
            if place > end:
                raise damaged(self._path, f"text {number} of {key} has a length of {length} bytes, beyond the file")
        self._place = place
        return Texts(self._data, begin, count)

    def _numbers(self, key: str, kind: int, count: int) -> NDArray[Any]:
        if kind not in NUMBERS:
            raise damaged(self._path, f"the type of {key} is {kind}, which is unknown")
        dtype = np.dtype(NUMBERS[kind])
        self._need(count * dtype.itemsize, key)
        if dtype.kind == "b":
            # A byte other than 0 and 1 must not become a bool.
            values: NDArray[Any] = np.frombuffer(self._data, np.uint8, count, self._place) != 0
        else:
            values = np.frombuffer(self._data, dtype, count, self._place)
        self._place += count * dtype.itemsize
        return values

    def _entry(self, number: int) -> tuple[str, BlockType, tuple[int, ...], int]:
        """Read a line of the table of tensors: name, type, shape and offset."""
        name = self._text(f"the name of tensor {number}", _LONGEST_NAME)
        dimensions = self._u32(f"the number of dimensions of {name}")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise damaged(self._path, f"tensor {name} has {dimensions} dimensions, not 1 to {MOST_DIMENSIONS}")
        sizes = [self._u64(f"dimension {i} of {name}") for i in range(dimensions)]
        number_of_type = self._u32(f"the type of {name}")
        offset = self._u64(f"the offset of {name}")
        kind = self._kind(name, number_of_type)
        if min(sizes) < 1 or sizes[0] % kind.inputs:
            raise damaged(
                self._path, f"tensor {name} has the dimensions {sizes}, and {kind.name} takes rows of {kind.inputs}"
            )
        return name, kind, tuple(reversed(sizes)), offset

    def _kind(self, name: str, number: int) -> BlockType:
        """Return the type of a tensor's blocks. GgufError for one that is not decoded here and now."""
        kind = TYPES.get(number)
        if kind is not None:
            return kind
        rare = PACKAGE_TYPES.get(number)
        if rare is None:
            stated = OTHER_TYPES.get(number, f"{number}, which is unknown")
            known = ", ".join(known.name for known in TYPES.values())
            raise GgufError(f"{self._path}: the type of tensor {name} is {stated}; use a file with these: {known}")
        if not package_decodes(rare):
            raise GgufError(
                f"{self._path}: the type of tensor {name} is {rare.name}, which the package gguf decodes: "
                "pip install --upgrade 'tokenyard[gguf]', or use a file of more bits"
            )
        return rare

    def _tensors(self, entries: list[tuple[str, BlockType, tuple[int, ...], int]], alignment: int) -> list[TensorEntry]:
        found = []
        names = set()
        begin = self._place
        free = begin
        for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[3]):
            rows = 1
            for size in shape[:-1]:
                rows *= size
            row_bytes = kind.row_bytes(shape[-1])
            first = begin + offset
            if name in names:
                raise damaged(self._path, f"it has two tensors of the name {name}")
            if offset % alignment or first < free:
                raise damaged(self._path, f"the offset of tensor {name} is {offset}, which is not where it can begin")
            if first + rows * row_bytes > len(self._data):
                raise damaged(
                    self._path,
                    f"tensor {name} of {list(shape)} in {kind.name} ends at byte {first + rows * row_bytes}, "
                    f"and the file has {len(self._data)}",
                )
            names.add(name)
            free = first + rows * row_bytes
            data = np.frombuffer(self._data, np.uint8, rows * row_bytes, first).reshape(rows, row_bytes)
            found.append(TensorEntry(name, kind, shape, data))
        return found

    def _text(self, field: str, most: int | None = None) -> str:
        length = self._u64(f"the length of {field}")
        if most is not None and length > most:
            raise damaged(self._path, f"the length of {field} is {length} bytes, more than {most}")
        self._need(length, field)
        self._place += length
        try:
            return str(self._data[self._place - length : self._place], "utf-8")
        except UnicodeDecodeError:
            raise damaged(self._path, f"{field} is no UTF-8") from None

    def _count(self, field: str, least_bytes: int) -> int:
        """Read how many entries follow, each of which takes at least so many bytes."""
        count = self._u64(field)
        if count * least_bytes > len(self._data) - self._place:
            raise damaged(self._path, f"{field} is {count}, more than its {len(self._data)} bytes can hold")
        return count

    def _u32(self, field: str) -> int:
        self._need(4, field)
        self._place += 4
        return int(_U32.unpack_from(self._data, self._place - 4)[0])

    def _u64(self, field: str) -> int:
        self._need(8, field)
        self._place += 8
        return int(_U64.unpack_from(self._data, self._place - 8)[0])

    def _need(self, num_bytes: int, field: str) -> None:
        if num_bytes > len(self._data) - self._place:
            raise damaged(self._path, f"it ends at byte {len(self._data)}, within {field}")
