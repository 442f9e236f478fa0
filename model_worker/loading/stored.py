"""The safetensors files of a checkpoint, as tensors that are read when they are wanted.

Knows where a checkpoint's files lie, and what people have in their place. Knows no model and no quantization.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from model_worker.host_memory import give_back
from shared.json_files import read_json_file
from shared.load_errors import broken_file

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a file. `dtype` is the name that safetensors gives to its type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slice: Any
    # Whether what is read are pages of a file that is mapped, and not memory of its own.
    mapped: bool = False

    def __getitem__(self, index: Any) -> Tensor:
        """Read a part of the tensor."""
        found: Tensor = self.slice[index]
        return found

    def read(self) -> Tensor:
        """Read all of it. (A tensor without dimensions cannot be indexed otherwise.)"""
        found: Tensor = self.slice[...]
        return found

    def let_go(self) -> None:
        """Give the pages of the file back. They are read again when the tensor is."""
        if self.mapped and self.shape:
            give_back([self.read().view(torch.uint8).numpy()])


@dataclass(frozen=True, eq=False)
class StoredCheckpoint:
    """The tensors of all files of a checkpoint, and what the files say about themselves.

    `replaced` are the names of those that came from elsewhere.
    """

    tensors: dict[str, Stored]
    metadata: dict[str, str]
    replaced: frozenset[str] = frozenset()


def stored_files(source: str | Path, subfolder: str = "") -> list[Path]:
    """List the files of weights of a directory or hub name. ValueError says what is wrong with them.

    Empty where there are none under the usual names.
    """
    index = _file(source, _INDEX, subfolder)
    if index is None:
        single = _file(source, _WEIGHTS, subfolder)
        return [] if single is None else [single]
    try:
        shards = read_json_file(index)["weight_map"]
        names = sorted(set(shards.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read as an index of weights: {error!r}") from None
    if not names:
        raise ValueError(f"{index} has an empty weight_map, so it names no weights; download the repository anew")
    found: list[Path] = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names {name!r} in weight_map; files must lie beside it")
        path = _file(source, name, subfolder)
        if path is None:
            raise ValueError(
                f"{name}, which {_INDEX} names, is missing: download the repository anew, all of its files"
            )
        found.append(path)
    return found


def open_stored(source: str | Path, subfolder: str = "") -> StoredCheckpoint:
    """Open the weights of a checkpoint without reading them. ValueError names the file that is broken."""
    tensors: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    for path in stored_files(source, subfolder):
        try:
            found, said = _open(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(broken_file(str(path.parent)) or f"{path}: {error}") from None
        tensors |= found
        metadata |= said
    return StoredCheckpoint(tensors, metadata)


def open_tensors(path: Path) -> dict[str, Stored]:
    """Open the tensors of one safetensors file. ValueError for a file that is none."""
    try:
        return _open(path)[0]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from None


def _open(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    file = safe_open(path, framework="pt")
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
    tensors = {
        name: Stored(name, part.get_dtype(), tuple(part.get_shape()), part, mapped=True) for name, part in parts.items()
    }
    return tensors, file.metadata() or {}


def _file(source: str | Path, name: str, subfolder: str) -> Path | None:
    """Find a file in a directory, or in the hub's cache, or on the hub."""
    if Path(source).expanduser().is_dir():
        path = Path(source).expanduser() / subfolder / name
        return path if path.is_file() else None
    found = cached_file(
        str(source),
        name,
        subfolder=subfolder,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


class Pool:
    """The tensors of a checkpoint that no format has taken yet."""

    def __init__(self, tensors: dict[str, Stored]) -> None:
        self._left = dict(tensors)
        # Tensors that say how activations or K and V are to be rounded, which nothing here does.
        self.unused: list[str] = []
        # The tensor that was taken last, which errors name.
        self.last = ""

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors that are left now, which may be taken meanwhile."""
        return iter(list(self._left))

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def __len__(self) -> int:
        return len(self._left)

    def peek(self, name: str) -> Stored | None:
        return self._left.get(name)

    def take(self, name: str) -> Stored:
        """Take a tensor that is there."""
        found = self._left.pop(name)
        self.last = name
        return found

    def take_if(self, name: str) -> Stored | None:
        return self.take(name) if name in self._left else None

    def leave_unused(self, name: str) -> None:
        """Take a tensor that is not needed, if it is there."""
        if self._left.pop(name, None) is not None:
            self.unused.append(name)

    @property
    def left(self) -> dict[str, Stored]:
        return self._left
