"""Asks the kernel to keep memory in large pages, so that streaming through it does not stall at every 4 KiB.

A large page comes with its first use, all of it cleared: a step that begins one in each of sixty arrays would wait for
a quarter of a second where memory is slow to come. So memory that is used from its beginning to its end is asked for
ahead of its use.

Knows addresses. All calls are requests: where the kernel has no large pages, or none left, nothing changes.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
_PAGE = 1 << 21
_SMALL_PAGE = 1 << 12
# linux/mman.h: make large pages of what is touched from now on, of what is there already (since Linux 6.1), and let
# pages come as if they were written to (since 5.14).
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_MADV_POPULATE_WRITE = 23

# Pre-faulted stretches: for the 135M model 22,000 tokens, 0.5 GB.
STRETCHES_AHEAD = 4
# Seconds without a step after which the process counts as idle: longer than the longest step of the standard model (0.7
# s). Beside the longer steps of larger models the bound on pages ahead still holds, and the pages that come then are
# needed soon.
IDLE_SECONDS = 1.0
# Pause after each page, as a multiple of the time that the page took to come, and its maximum in seconds: so other
# threads lose a fifth of a core, and not a whole one.
PAUSES = 4
LONGEST_PAUSE = 0.1


def keep_in_huge_pages(arrays: Iterable[NDArray[np.generic]], *, written: bool) -> None:
    """Ask for large pages for these arrays. `written`: their contents are there already, and are moved.

    The pages reach over the edges of arrays: many small ones that lie side by side become one large page.
    """
    pages = {
        page
        for array in arrays
        for page in range(array.ctypes.data // _PAGE, -(-(array.ctypes.data + array.nbytes) // _PAGE))
    }
    for page in sorted(pages):
        _advise(page * _PAGE, _PAGE, _MADV_HUGEPAGE)
        if written:
            _advise(page * _PAGE, _PAGE, _MADV_COLLAPSE)


class PagesAhead:
    """Has the pages of arrays provided before they are used.

    Arrays begin with the same number of items, which are first used in about their order. A stretch is as many items as
    fill a large page in the largest of the arrays. When the first item of a stretch is used, the next stretch comes, a
    page at a time; during idle time more of them come, so that a burst of work finds them. No more memory is taken than
    STRETCHES_AHEAD beyond the last stretch in use.
    """

    def __init__(self, arrays: Sequence[NDArray[np.generic]]) -> None:
        self._arrays = arrays
        self._stretch = max(1, _PAGE // max(array[0].nbytes for array in arrays))
        self._last: int = (len(arrays[0]) - 1) // self._stretch
        # The last stretch that is there or on its way, the last one in use, and how often any was used.
        self._provided = self._used = self._uses = 0
        self._idle: threading.Thread | None = None

    def use(self, item: int) -> None:
        """Record that items up to this one are used."""
        self._uses += 1
        self._used = max(self._used, item // self._stretch)
        following = min(self._used + 1, self._last)
        if self._provided < following:
            self._provided = following
            threading.Thread(target=self._provide, args=(following,), name="pages-ahead", daemon=True).start()
        if self._provided < self._wanted and (self._idle is None or not self._idle.is_alive()):
            self._idle = threading.Thread(target=self._provide_when_idle, name="pages-when-idle", daemon=True)
            self._idle.start()

    @property
    def _wanted(self) -> int:
        return min(self._used + STRETCHES_AHEAD, self._last)

    def _provide_when_idle(self) -> None:
        while self._provided < self._wanted:
            uses = self._uses
            time.sleep(IDLE_SECONDS)
            if uses == self._uses:
                self._provided += 1
                self._provide(self._provided)

    def _provide(self, stretch: int) -> None:
        first = stretch * self._stretch
        for array in self._arrays:
            begun = time.monotonic()
            part = array[first : first + self._stretch]
            start = part.ctypes.data // _SMALL_PAGE * _SMALL_PAGE
            _advise(start, part.ctypes.data + part.nbytes - start, _MADV_POPULATE_WRITE)
            if self._used < stretch:
                time.sleep(min(PAUSES * (time.monotonic() - begun), LONGEST_PAUSE))


def _advise(address: int, size: int, advice: int) -> None:
    if _libc is not None:
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
