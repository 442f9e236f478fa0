"""Reads the two files of an adapter's directory as PEFT writes them: its config, and its tensors from safetensors.

The files come from strangers. Sizes are checked before memory is taken, links are not followed, and nothing in a file
is run: pickles (`.bin`) are refused. Knows bytes. Does not know what a tensor means.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from model_worker.adapters.refusal import AdapterRefused

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

MOST_CONFIG_BYTES = 1 << 20
# Of a safetensors file: a header names each tensor in some hundred bytes.
MOST_HEADER_BYTES = 16 << 20
MOST_TENSORS = 1 << 16
# Bytes of the number in front of a header.
_LENGTH = 8
_DIGEST_BYTES = 16
# How a folder is opened on the way to an adapter: to pass through takes no right to list it.
_TO_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Element(NamedTuple):
    """How a type of numbers lies in a file, and what torch calls it."""

    stored: Any
    dtype: torch.dtype


_ELEMENTS = {
    "F32": _Element(np.dtype("<f4"), torch.float32),
    "F16": _Element(np.dtype("<f2"), torch.float16),
    "BF16": _Element(np.dtype("<i2"), torch.bfloat16),
}


class _Place(NamedTuple):
    """Where a tensor lies in the data of a file."""

    kind: str
    shape: tuple[int, ...]
    first: int
    end: int


class AdapterFiles(NamedTuple):
    """The contents of an adapter's directory. The tensors have the types that they have in the file."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str  # of the config and the tensors, whatever the directory is called


def read_files(folder: Path, most_bytes: int) -> AdapterFiles:
    """Read an adapter's directory, whose tensors may take `most_bytes`.

    Raises FileNotFoundError where there is none, AdapterRefused for one that cannot be read, and OSError.
    """
    descriptor = _open_folder(folder)
    try:
        config = _parsed(_read(descriptor, folder, CONFIG, MOST_CONFIG_BYTES), CONFIG)
        data = _read(descriptor, folder, WEIGHTS, most_bytes)
    finally:
        os.close(descriptor)
    if len(data) < _LENGTH:
        raise AdapterRefused(f"{WEIGHTS} has {len(data)} bytes, and is no safetensors file: save the adapter again")
    length = int.from_bytes(data[:_LENGTH], "little")
    if length > min(MOST_HEADER_BYTES, len(data) - _LENGTH):
        raise AdapterRefused(
            f"{WEIGHTS} announces a header of {length} bytes: the file has {len(data)}, and at most "
            f"{MOST_HEADER_BYTES} are read. Save the adapter again"
        )
    begin = _LENGTH + length
    header = _parsed(data[_LENGTH:begin], f"the header of {WEIGHTS}")
    places = _places(header, len(data) - begin)
    digest = blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=_DIGEST_BYTES)
    tensors = {}
    for name, place in sorted(places.items()):
        stored = data[begin + place.first : begin + place.end]
        digest.update(json.dumps([name, place.kind, place.shape]).encode())
        digest.update(stored)
        element = _ELEMENTS[place.kind]
        numbers = torch.from_numpy(np.frombuffer(stored, element.stored).copy())
        tensors[name] = numbers.view(element.dtype).reshape(place.shape)
    return AdapterFiles(config, tensors, digest.hexdigest())


def _open_folder(folder: Path) -> int:
    """Open a directory part by part, so that nothing that becomes a link meanwhile is followed.

    Its path was checked when it was named, and had no link then.
    """
    descriptor = os.open("/", _TO_FOLDER)
    for part in folder.absolute().parts[1:]:
        try:
            deeper = os.open(part, _TO_FOLDER, dir_fd=descriptor)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no adapter, for want of a folder", str(folder)) from None
        except NotADirectoryError:
            raise AdapterRefused(
                f"{part!r} in {folder} is no folder, or a link, and links are not followed: name the real folder"
            ) from None
        finally:
            os.close(descriptor)
        descriptor = deeper
    return descriptor


def _read(parent: int, folder: Path, name: str, most: int) -> bytes:
    """Read a regular file of at most `most` bytes in a folder, which is open as `parent`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(_path_of(folder, name), flags, dir_fd=parent)
    except FileNotFoundError:
        if name == WEIGHTS and os.path.lexists(folder / PICKLE):
            raise AdapterRefused(
                f"{PICKLE} is a pickle, which can run code, and is never read: save the adapter with "
                "save_pretrained(..., safe_serialization=True)"
            ) from None
        raise FileNotFoundError(errno.ENOENT, f"there is no adapter, for want of {name}", str(folder)) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise AdapterRefused(f"{name} is a link, and links are not followed: copy the file") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterRefused(f"{name} is no regular file: copy the adapter's files into its directory")
        if status.st_size > most:
            raise AdapterRefused(f"{name} has {status.st_size} bytes, and at most {most} are read")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise AdapterRefused(f"{name} grows while it is read: load the adapter when it is complete")
    return data


def _path_of(folder: Path, name: str) -> Path:
    """Return the path to open, from the folder. The hub's local cache consists of links to files of the same
    repository."""
    path = folder / name
    in_cache = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    if in_cache and path.is_symlink():
        target = path.resolve()
        if target.parent == (folder.parents[1] / "blobs").resolve():
            return target
    return Path(name)


def _parsed(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{what} is not valid JSON ({error}): save the adapter again") from None
    if not isinstance(value, dict):
        raise AdapterRefused(f"{what} is not a JSON object: save the adapter again")
    return value


def _places(header: dict[str, Any], size: int) -> dict[str, _Place]:
    """Return where the tensors lie in `size` bytes of data. They may not overlap, which would multiply memory."""
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if len(entries) > MOST_TENSORS:
        raise AdapterRefused(f"{WEIGHTS} has {len(entries)} tensors, and at most {MOST_TENSORS} are read")
    places = {name: _place(name, entry, size) for name, entry in entries.items()}
    end = 0
    for name, place in sorted(places.items(), key=lambda item: item[1].first):
        if place.first < end:
            raise AdapterRefused(f"tensor {name} lies where another one does: save the adapter again")
        end = place.end
    return places


def _place(name: str, entry: Any, size: int) -> _Place:
    fields = entry if isinstance(entry, dict) else {}
    kind = fields.get("dtype")
    if not isinstance(kind, str) or kind not in _ELEMENTS:
        raise AdapterRefused(
            f"tensor {name} has the type {kind!r}: adapters are read in {', '.join(_ELEMENTS)}; convert it to float32"
        )
    shape = _whole_numbers(name, fields.get("shape"))
    if not shape or min(shape) < 1:
        raise AdapterRefused(f"tensor {name} has the shape {list(shape)}: it must not be empty")
    offsets = _whole_numbers(name, fields.get("data_offsets"))
    if len(offsets) != 2:
        raise AdapterRefused(f"tensor {name} has no begin and end in the file: save the adapter again")
    first, end = offsets
    if end - first != math.prod(shape) * _ELEMENTS[kind].stored.itemsize or end > size:
        raise AdapterRefused(
            f"tensor {name} of shape {list(shape)} lies at bytes {first} to {end} of {size}: the file is cut off or "
            "wrong; save the adapter again"
        )
    return _Place(kind, shape, first, end)


def _whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Check a few numbers of a header, none of them negative."""
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise AdapterRefused(f"tensor {name} has a broken entry in the header of {WEIGHTS}: save the adapter again")
    return tuple(value)
