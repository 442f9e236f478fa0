"""Memory of the host in the place of a GPU's: pieces are files in memory, whose handles are descriptors."""

from __future__ import annotations

import errno
import mmap
import os
import warnings

import torch
from torch import Tensor


class HostPieces:
    """Pieces (model_worker/keeper/pieces.py) of at most `most` bytes together."""

    def __init__(self, device: int = 0, most: int = 1 << 30) -> None:
        self.left = most
        # A handle that is not passed on.
        self.refused: int | None = None
        self._sizes: dict[int, int] = {}

    @property
    def handles(self) -> list[int]:
        return list(self._sizes)

    def make(self, size: int) -> int:
        if size > self.left:
            raise OSError(errno.ENOMEM, f"{self.left} bytes are free")
        handle = os.memfd_create("tokenyard-piece")
        os.ftruncate(handle, size)
        self._sizes[handle] = size
        self.left -= size
        return handle

    def export(self, handle: int) -> int:
        if handle == self.refused:
            raise OSError(errno.EIO, "it is refused")
        return os.dup(handle)

    def free(self, handle: int) -> None:
        os.close(handle)
        self.left += self._sizes.pop(handle)

    def tensor(self, descriptor: int, size: int, writable: bool) -> Tensor:
        mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        with warnings.catch_warnings(category=UserWarning, action="ignore"):  # that it must not be written to
            return torch.frombuffer(mapped, dtype=torch.uint8)
