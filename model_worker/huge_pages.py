"""Asks the kernel to keep memory in large pages, so that streaming through it does not stall at every 4 KiB.

Knows addresses. Everything here is a wish: where the kernel has no large pages, or none left, nothing changes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_PAGE = 1 << 21
# linux/mman.h: make large pages of what is touched from now on, and of what is there already (since Linux 6.1).
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def keep_in_huge_pages(arrays: Iterable[NDArray[np.generic]], *, written: bool) -> None:
    """Large pages for these arrays. `written`: their contents are there already, and are moved.

    The pages reach over the edges of arrays: many small ones that lie side by side become one large page.
    """
    if not sys.platform.startswith("linux"):
        return
    advise = ctypes.CDLL(None).madvise
    pages = {
        page
        for array in arrays
        for page in range(array.ctypes.data // _PAGE, -(-(array.ctypes.data + array.nbytes) // _PAGE))
    }
    for page in sorted(pages):
        place, size = ctypes.c_void_p(page * _PAGE), ctypes.c_size_t(_PAGE)
        advise(place, size, _MADV_HUGEPAGE)
        if written:
            advise(place, size, _MADV_COLLAPSE)
