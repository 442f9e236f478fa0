"""Pieces of a device's memory that processes share by descriptors.

The memory of a piece is there as long as a process has its handle, a descriptor of it, or a mapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

# Bytes of which a piece has a whole number: the pages in which GPUs hand out memory.
UNIT = 2 << 20


class Pieces(Protocol):
    """The memory of one device."""

    def make(self, size: int) -> int:
        """Return the handle of a new piece of so many bytes, a multiple of UNIT. OSError says why there is none."""
        ...

    def export(self, handle: int) -> int:
        """Return a new descriptor of a piece, which is the caller's to close. OSError where that fails."""
        ...

    def free(self, handle: int) -> None:
        """Let go of a piece."""
        ...

    def tensor(self, descriptor: int, size: int, writable: bool) -> Tensor:
        """Return a piece as u8[size] on the device; it is mapped as long as a tensor uses it.

        OSError says why it cannot be mapped. The descriptor stays the caller's.
        """
        ...
