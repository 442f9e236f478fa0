"""Large pages change where memory lies, and nothing in it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from model_worker.huge_pages import PagesAhead, keep_in_huge_pages


@pytest.mark.parametrize("written", [True, False])
def test_contents_stay(written: bool) -> None:
    rng = np.random.default_rng()
    arrays = [rng.integers(0, 1 << 30, size) for size in (1, 1000, 100_000, 1_000_000, 3_000_000)]
    copies = [array.copy() for array in arrays]
    keep_in_huge_pages(arrays, written=written)
    for array, copy in zip(arrays, copies, strict=True):
        assert np.array_equal(array, copy)
        array += 1
        assert np.array_equal(array, copy + 1)


def _resident(array: np.ndarray) -> int:
    """Bytes of the array that the kernel has provided, by its page map."""
    first, end = array.ctypes.data >> 12, (array.ctypes.data + array.nbytes) >> 12
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (end - first)), np.uint64)
    return int((entries >> np.uint64(63)).sum()) << 12


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pages-ahead"]


def test_pages_come_one_stretch_ahead_and_contents_stay() -> None:
    items, size = 1000, 1 << 15  # 64 items are a stretch
    arrays = [np.zeros((items, size), np.uint8) for _ in range(3)]
    keep_in_huge_pages(arrays, written=False)
    ahead = PagesAhead(arrays)
    arrays[1][64:128, 5] = 7
    for used, resident in ((3, 1), (63, 1), (64, 2), (70, 2), (999, 2)):
        ahead.use(used)
        for thread in _threads():
            thread.join()
        for array in arrays:
            # Beside the first stretch, of which nothing was used here, and a large page that reaches over its edge.
            assert resident << 21 <= _resident(array) <= (resident + 2) << 21
    assert (arrays[1][64:128, 5] == 7).all()
    assert arrays[1].sum() == 7 * 64
    assert not arrays[0].any()
