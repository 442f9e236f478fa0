"""A worker's end of the keeper: weights that are found there are mapped, and those that were read are moved there.

Knows tensors by their names. Does not know what model they make.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from model_worker.keeper.pieces import UNIT, Pieces
from model_worker.keeper.protocol import START_SECONDS, Conversation, Drop, Fetch, Make, Open, Seal, conversation

log = logging.getLogger(__name__)

# Most bytes of a piece, unless one storage has more. While weights move, those of a piece are on the device twice.
_PIECE_BYTES = 256 << 20
# Bytes at multiples of which storages begin, as torch's own allocator has them.
_ALIGNMENT = 512
# What may go wrong with a keeper, its memory and its manifest. torch has no memory: a RuntimeError.
_ERRORS = (OSError, RuntimeError, ValueError, LookupError, TypeError)


class ModelFacts(msgspec.Struct, frozen=True):
    """What makes modules for the tensors: their dtype, the generation config as JSON, and the linear ones in FP8, with
    scales of outputs and of blocks, and in four or eight bits, with what their codes are (bits, middle and table). Of
    unused tensors, which are not kept, the dtype and shape."""

    dtype: str
    generation: str
    in_fp8: list[str]
    in_fp8_blocks: list[str]
    in_groups: dict[str, tuple[int, int, bytes]]
    # Projections of encoded experts: their shapes in the module, and what their codes are, if they are not in FP8.
    experts: dict[str, tuple[list[int], tuple[int, int, bytes] | None]] = {}
    unused: dict[str, tuple[str, list[int]]] = {}


class _Entry(msgspec.Struct, frozen=True):
    """Where a tensor lies: its piece, and the bytes before it there. Strides count elements."""

    name: str
    piece: int
    offset: int
    dtype: str
    shape: list[int]
    strides: list[int]


class _Piece(msgspec.Struct, frozen=True):
    """The bytes of a piece, and the sum of its 64-bit words modulo 2^64."""

    size: int
    sum: int


class _Manifest(msgspec.Struct, frozen=True):
    facts: ModelFacts
    pieces: list[_Piece]
    tensors: list[_Entry]


@dataclass(frozen=True, eq=False)
class Found:
    """Weights that are mapped, not to be written to."""

    facts: ModelFacts
    tensors: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class _Storage:
    """A storage that tensors of these names share, and the bytes before it in its piece."""

    storage: torch.UntypedStorage
    names: list[str]
    offset: int


class KeptWeights:
    """The weights of one worker, as far as its keeper has them. Nothing that fails here ends the worker."""

    def __init__(self, path: Path, make_pieces: Callable[[], Pieces]) -> None:
        """The keeper listens at `path`. `make_pieces` raises OSError where memory of the device cannot be shared."""
        self._path = path
        self._make_pieces = make_pieces
        # Whether memory of the device can be shared, as far as is known.
        self.able = True
        # Bytes that this process uses of the keeper's memory.
        self.size = 0

    def find(self, identity: str) -> Found | None:
        """Map the weights of this identity. None if they are not kept; the log says why."""
        try:
            with conversation(self._path, START_SECONDS) as line:
                answer, descriptor = line.ask(Open(identity))
                if descriptor is None:
                    self.able = answer.able
                    log.info("the weights are read from files, since %s", answer.reason)
                    return None
                manifest = msgspec.msgpack.decode(_content(descriptor), type=_Manifest)
                found = self._mapped(line, manifest)
        except _ERRORS as error:
            log.warning("the weights are read from files, since %s", _said(error))
            found = None
        if found is None:
            # The error is dropped by here, and with it all mappings. The keeper frees its weights first.
            self._free()
            return None
        self.size = sum(piece.size for piece in manifest.pieces)
        log.info("the weights were kept: %.2f GiB are mapped, and no file of them is read", self.size / 2**30)
        return found

    def keep(self, identity: str, facts: ModelFacts, *parts: Mapping[str, Tensor]) -> None:
        """Move tensors into the keeper's memory, and have it keep them for the next worker.

        No piece has tensors of two `parts`, so that each part can be let go of alone.
        Parameters lie there from now on; of others there is a copy. What cannot be moved stays where it is.
        """
        if not self.able:
            return
        try:
            with conversation(self._path) as line:
                answer, _ = line.ask(Drop())
                if answer.reason:
                    raise OSError(answer.reason)
                manifest = self._moved(line, facts, parts)
                _seal(line, identity, manifest)
        except _ERRORS as error:
            log.warning("the weights are not kept for the next worker, since %s", _said(error))
            return
        log.info("%.2f GiB of weights are kept for the next worker", self.size / 2**30)

    def drop(self) -> None:
        """Have the keeper free its memory. No tensor that lies there is used any more.

        A keeper that does not answer is asked again by the next call.
        """
        if self.size:
            self._free()

    def _free(self) -> None:
        try:
            with conversation(self._path) as line:
                line.ask(Drop())
        except ConnectionError:  # no keeper has them
            pass
        except OSError as error:
            log.warning("the keeper of the weights may still have them: %s", _said(error))
            return
        self.size = 0

    def _mapped(self, line: Conversation, manifest: _Manifest) -> Found:
        """Map all pieces. ValueError for one that is not what it was."""
        memory = self._make_pieces()
        pieces = []
        for index, piece in enumerate(manifest.pieces):
            mapped = _tensor(memory, line.descriptor(Fetch(index)), piece.size, writable=False)
            if _sum(mapped) != piece.sum:
                raise ValueError("what was kept has changed since")
            pieces.append(mapped)
        return Found(manifest.facts, {entry.name: _view(pieces[entry.piece], entry) for entry in manifest.tensors})

    def _moved(self, line: Conversation, facts: ModelFacts, parts: Iterable[Mapping[str, Tensor]]) -> _Manifest:
        memory = self._make_pieces()
        entries: list[_Entry] = []
        pieces: list[_Piece] = []
        for tensors, (size, storages) in ((part, one) for part in parts for one in _parted(part)):
            mapped = _tensor(memory, line.descriptor(Make(size)), size, writable=True)
            for one in storages:
                of_storage = torch.empty(0, dtype=torch.uint8, device=mapped.device).set_(one.storage)
                copied = mapped[one.offset : one.offset + len(of_storage)].copy_(of_storage)
                # The model has been proven with what it had.
                if _sum(copied) != _sum(of_storage):
                    raise OSError("a copy of the weights is not what they are")
            # Counted from now on, whatever follows: the first parameter that lies there keeps the piece.
            self.size += size
            for one in storages:
                # All are described before the first one moves: a tensor may have several names.
                found = [_entry(name, tensors[name], len(pieces), one.offset) for name in one.names]
                for entry in found:
                    if isinstance(tensors[entry.name], nn.Parameter):
                        tensors[entry.name].data = _view(mapped, entry)
                entries += found
            pieces.append(_Piece(size, _sum(mapped)))
            # The next piece may need the memory that the weights have left.
            del one, of_storage, storages
            if mapped.device.type == "cuda":
                torch.cuda.empty_cache()
        return _Manifest(facts, pieces, entries)


def _parted(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, list[_Storage]]]:
    """Part the storages of tensors into pieces. Yields the size of each, and what lies there."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    filled = 0
    storages: list[_Storage] = []
    for of_storage in names.values():
        storage = tensors[of_storage[0]].untyped_storage()
        size = _whole(storage.nbytes(), _ALIGNMENT)
        if storages and filled + size > _PIECE_BYTES:
            yield _whole(filled, UNIT), _handed_over(storages)
            filled = 0
        storages.append(_Storage(storage, of_storage, filled))
        filled += size
        del storage
    if storages:
        yield _whole(filled, UNIT), _handed_over(storages)


def _handed_over(storages: list[_Storage]) -> list[_Storage]:
    """Return what a list has, and leave it empty: a storage that this module still knew would keep its memory."""
    taken = storages.copy()
    storages.clear()
    return taken


def _whole(size: int, unit: int) -> int:
    """Round up to a multiple of `unit` that is above 0."""
    return max(1, -(-size // unit)) * unit


def _entry(name: str, tensor: Tensor, piece: int, start: int) -> _Entry:
    """Describe a tensor whose storage begins `start` bytes after the beginning of a piece."""
    offset = start + int(tensor.storage_offset()) * tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Entry(name, piece, offset, dtype, list(tensor.shape), list(tensor.stride()))


def _view(piece: Tensor, entry: _Entry) -> Tensor:
    """Return the tensor that an entry describes. ValueError for a dtype that torch has not."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry.name} has dtype {entry.dtype}")
    start = entry.offset // dtype.itemsize
    plain = torch.empty(0, dtype=dtype, device=piece.device)
    return plain.set_(piece.untyped_storage(), start, entry.shape, entry.strides)


def _tensor(memory: Pieces, descriptor: int, size: int, writable: bool) -> Tensor:
    try:
        return memory.tensor(descriptor, size, writable)
    finally:
        os.close(descriptor)


def _sum(content: Tensor) -> int:
    """Add up the 64-bit words of u8[size], and the bytes that are left."""
    whole = len(content) // 8 * 8
    return int(content[:whole].view(torch.int64).sum()) + int(content[whole:].sum())


def _seal(line: Conversation, identity: str, manifest: _Manifest) -> None:
    """Give the keeper the manifest, in memory without a name. OSError if it does not take it."""
    descriptor = os.memfd_create("tokenyard-manifest")
    try:
        with open(os.dup(descriptor), "wb") as file:
            file.write(msgspec.msgpack.encode(manifest))
        answer, _ = line.ask(Seal(identity), descriptor)
    finally:
        os.close(descriptor)
    if answer.reason:
        raise OSError(answer.reason)


def _content(descriptor: int) -> bytes:
    """Read a manifest from its beginning, and close the descriptor."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def _said(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).partition("\n")[0]
