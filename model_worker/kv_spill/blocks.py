"""Copies whole blocks of a KV cache out of it and into it: the bytes of all layers, K and V, one after the other.

Knows the memory of a cache. Does not know where the bytes go.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.device_copy import Download, Mark, upload
from model_worker.kv_cache import KVCache, memory_of


class Copied(Protocol):
    """Blocks that are being copied out."""

    def wait(self) -> NDArray[np.uint8]:
        """Return the bytes [blocks, bytes of a block], once they are here."""
        ...


class Blocks(Protocol):
    """The blocks of one KV cache. `still`: they are copied out only while no step is in flight."""

    still: bool
    block_bytes: int

    def copy_out(self, blocks: NDArray[np.int32]) -> Copied:
        """Begin to copy what the steps before this call leave in the blocks."""
        ...

    def mark(self) -> Mark:
        """Return a mark behind which `copy_in` may write: steps before it may still write to the same blocks."""
        ...

    def copy_in(self, blocks: NDArray[np.int32], data: NDArray[np.uint8], after: Mark) -> None:
        """Write the bytes [blocks, bytes of a block] to the blocks, and return when they are there.

        For a thread beside the steps' own.
        """
        ...


class _Here:
    """Bytes that are here."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data

    def wait(self) -> NDArray[np.uint8]:
        return self._data


class HostBlocks:
    """Blocks in the memory of a CPU."""

    still = True

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.block_bytes = sum(part.shape[1] for part in self._memory())

    def copy_out(self, blocks: NDArray[np.int32]) -> Copied:
        return _Here(np.concatenate([part[blocks] for part in self._memory()], axis=1))

    def mark(self) -> Mark:
        return Mark(torch.device("cpu"))

    def copy_in(self, blocks: NDArray[np.int32], data: NDArray[np.uint8], after: Mark) -> None:
        at = 0
        for part in self._memory():
            part[blocks] = data[:, at : at + part.shape[1]]
            at += part.shape[1]

    def _memory(self) -> list[NDArray[np.uint8]]:
        tensors = (*self._cache.k, *self._cache.v)
        return [memory_of(tensor).reshape(tensor.shape[0], -1).view(np.uint8) for tensor in tensors]


class DeviceBlocks:
    """Blocks in the memory of any device, by torch. The device copies out in the order of its steps."""

    still = False

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.block_bytes = sum(part.shape[1] for part in self._memory())

    def copy_out(self, blocks: NDArray[np.int32]) -> Copied:
        index = upload(blocks.astype(np.int64), self._device)
        return Download(torch.cat([part.index_select(0, index) for part in self._memory()], dim=1))

    def mark(self) -> Mark:
        return Mark(self._device)

    def copy_in(self, blocks: NDArray[np.int32], data: NDArray[np.uint8], after: Mark) -> None:
        after.wait()
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            index = upload(blocks.astype(np.int64), self._device)
            here = upload(np.require(data, requirements="W"), self._device)
            at = 0
            for part in self._memory():
                part.index_copy_(0, index, here[:, at : at + part.shape[1]])
                at += part.shape[1]
            Mark(self._device).wait()

    def _memory(self) -> list[Tensor]:
        """The tensors as bytes [blocks, bytes of a block], views of them."""
        tensors = (*self._cache.k, *self._cache.v)
        return [_contiguous(tensor).view(torch.uint8).flatten(1) for tensor in tensors]


def _contiguous(tensor: Tensor) -> Tensor:
    """View a tensor of blocks as it lies in memory: a CPU's has the heads before the tokens."""
    return tensor if tensor.is_contiguous() else tensor.transpose(1, 2)
