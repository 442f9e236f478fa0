"""A GGUF model: one file, or the parts of a split one, read as a whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.gguf.blocks import OUTPUTS_AT_A_TIME, decode
from shared.gguf.format import SUFFIX, BlockType, GgufError, damaged
from shared.gguf.header import Header, TensorEntry, Texts, read_header

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
# Parts of a split model; files of many more are not made.
_MOST_PARTS = 1000
# Letters of a token. Those of models have up to a hundred; merges are looked for at each place in a token.
_LONGEST_TOKEN = 1000


@dataclass(frozen=True, eq=False)
class Matrix:
    """A tensor in blocks, or a part of one, as rows of inputs. Nothing is decoded before it is asked for."""

    name: str
    kind: BlockType
    shape: tuple[int, int]  # outputs, inputs
    rows: NDArray[np.uint8]  # [outputs, bytes of a row], mapped
    order: NDArray[np.int64] | None = None  # the stored row of each output; None: as they are stored

    def raw(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return the blocks of these outputs: u8[last - first, bytes of a row]."""
        return self.rows[first:last] if self.order is None else self.rows[self.order[first:last]]

    def decode(self, first: int, last: int) -> NDArray[np.float32]:
        """Return the values of these outputs: f32[last - first, inputs]."""
        return decode(self.kind, self.raw(first, last))

    def part(self, first: int, last: int) -> Matrix:
        """Return the matrix of these outputs, of one that is in the order of its file."""
        return Matrix(self.name, self.kind, (last - first, self.shape[1]), self.rows[first:last])

    def in_order(self, order: NDArray[np.int64]) -> Matrix:
        """Return the matrix whose output i is the stored row order[i]."""
        return Matrix(self.name, self.kind, self.shape, self.rows, order)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of a GGUF model: `shape` has the inputs last."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    rows: NDArray[np.uint8]  # [rows, bytes of a row], mapped

    @property
    def matrix(self) -> Matrix:
        """All rows of the tensor; those of several matrices lie one behind the other."""
        return Matrix(self.name, self.kind, (len(self.rows), self.shape[-1]), self.rows)

    def values(self) -> NDArray[np.float32]:
        """Decode all of the tensor, in its shape. For small ones."""
        whole = self.matrix
        parts = [
            whole.decode(first, first + OUTPUTS_AT_A_TIME) for first in range(0, len(self.rows), OUTPUTS_AT_A_TIME)
        ]
        return np.concatenate(parts).reshape(self.shape)


class GgufFile:
    """The metadata and tensors of a model. Reading a value of another kind raises GgufError with the key."""

    def __init__(self, path: str, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @cached_property
    def tokens(self) -> list[str]:
        """The texts of the vocabulary's tokens."""
        found = self.texts("tokenizer.ggml.tokens")
        for number, token in enumerate(found):
            if len(token) > _LONGEST_TOKEN:
                said = f"token {number} of tokenizer.ggml.tokens has {len(token)} letters"
                raise damaged(self.path, f"{said}; up to {_LONGEST_TOKEN} can be read")
        return found

    def forget_tokens(self) -> None:
        """Let go of the texts of the vocabulary, some hundred thousand; they are read again when they are asked for."""
        self.__dict__.pop("tokens", None)

    def wrong(self, key: str, wanted: str) -> GgufError:
        """Return the error for a metadata value."""
        value = self.metadata.get(key)
        stated = "missing" if value is None else f"{type(value).__name__} {_short(value)}"
        return GgufError(
            f"{self.path}: {key} is {stated} and should be {wanted}; convert the model again, or get it again"
        )

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 0, most: int = 1 << 31) -> int:
        """Read a number; of an array, which has one for each layer, the number that all its elements are."""
        value = self.metadata.get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(set(value.tolist())) == 1:
            value = int(value[0])
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0, most: float = 1e12) -> float:
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.wrong(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        value = self.metadata.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, Texts):
            raise self.wrong(key, "an array of texts")
        try:
            return value.read()
        except UnicodeDecodeError as error:
            raise damaged(self.path, f"a text of {key} is no UTF-8: {error.object[:20]!r}") from None

    def numbers(self, key: str, kinds: str = "iuf") -> NDArray[Any] | None:
        """Read an array of numbers; None where there is none."""
        value = self.metadata.get(key)
        if value is not None and not (isinstance(value, np.ndarray) and value.dtype.kind in kinds):
            raise self.wrong(key, "an array of numbers")
        return value

    def tensor(self, name: str) -> Tensor:
        found = self.tensors.get(name)
        if found is None:
            raise damaged(self.path, f"it has no tensor {name}")
        return found


def open_gguf(path: str | Path) -> GgufFile:
    """Open a model by its file, or by any of its parts. Raise GgufError with what is wrong with it, or OSError."""
    headers = [read_header(part) for part in parts_of(path)]
    metadata = headers[0].metadata
    if len(headers) > 1:
        _check_parts(headers)
    elif metadata.get("split.count", 0) not in (0, 1):
        raise GgufError(
            f"{path}: split.count is {_short(metadata['split.count'])}, and its name does not say which part it is: "
            "name the parts as they were, like NAME-00001-of-00003.gguf"
        )
    tensors: dict[str, Tensor] = {}
    for header in headers:
        for entry in header.tensors:
            if entry.name in tensors:
                raise damaged(header.path, f"tensor {entry.name} is in another part, too")
            tensors[entry.name] = _tensor(entry)
    if not tensors:
        raise GgufError(f"{path}: it has no tensors, only metadata: name the file with the weights")
    return GgufFile(str(path), metadata, tensors)


def parts_of(path: str | Path) -> list[Path]:
    """Return the files of a model, of which `path` is one, in order. GgufError names one that is missing."""
    path = Path(path)
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= _MOST_PARTS:
        raise GgufError(f"{path}: its name says part {found['number']} of {found['count']}, which is none: rename it")
    parts = [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    for part in parts:
        if not part.exists():
            raise GgufError(f"{path}: part {part.name} of the model is missing from its folder: get it, too")
    return parts


def _check_parts(headers: list[Header]) -> None:
    for number, header in enumerate(headers):
        stated = (header.metadata.get("split.no"), header.metadata.get("split.count"))
        if stated != (number, len(headers)):
            raise damaged(
                header.path, f"split.no and split.count are {_short(stated)} and should be {(number, len(headers))}"
            )
    wanted = headers[0].metadata.get("split.tensors.count")
    found = sum(len(header.tensors) for header in headers)
    if wanted is not None and wanted != found:
        raise damaged(headers[0].path, f"split.tensors.count is {_short(wanted)}, and its parts have {found} tensors")


def _tensor(entry: TensorEntry) -> Tensor:
    return Tensor(entry.name, entry.kind, entry.shape, entry.data)


def _short(value: Any) -> str:
    """Return a value as an error shows it."""
    if isinstance(value, Texts):
        return f"of {value.length} texts"
    text = repr(value.tolist() if isinstance(value, np.ndarray) and value.size < 10 else value)
    return text if len(text) < 80 else f"{text[:77]}..."
