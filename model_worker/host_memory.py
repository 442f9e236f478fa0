"""Gives memory of this process back to the kernel. Knows addresses; where the kernel refuses, nothing changes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
_PAGE = 1 << 12
# linux/mman.h
_MADV_DONTNEED = 4


def give_back(arrays: Iterable[NDArray[np.generic]]) -> None:
    """Give the pages of arrays back, all but those at their edges.

    They hold zeros from then on; those that map a file have what it has, and are read again when they are looked at.
    """
    for array in arrays:
        first = -(-array.ctypes.data // _PAGE) * _PAGE
        size = (array.ctypes.data + array.nbytes) // _PAGE * _PAGE - first
        if _libc is not None and size > 0:
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_DONTNEED)


def trim_heap() -> None:
    """Have the C library give back what it keeps of freed memory."""
    if _libc is not None and hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
