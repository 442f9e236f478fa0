"""Large pages change where memory lies, and nothing in it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from model_worker.cpu import huge_pages
from model_worker.cpu.huge_pages import STRETCHES_AHEAD, PagesAhead, keep_in_huge_pages


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


def _ahead(items: int) -> tuple[list[NDArray[np.uint8]], PagesAhead]:
    arrays = [np.zeros((items, 1 << 15), np.uint8) for _ in range(3)]  # 64 items are a stretch
    keep_in_huge_pages(arrays, written=False)
    return arrays, PagesAhead(arrays)


def _threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def _check(arrays: list[NDArray[np.uint8]], stretches: int) -> None:
    for array in arrays:
        # Beside the first stretch, of which nothing was used here, and a large page that reaches over its edge.
        assert stretches << 21 <= _resident(array) <= (stretches + 2) << 21


def test_under_load_the_next_stretch_comes_and_contents_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "STRETCHES_AHEAD", 1)
    arrays, ahead = _ahead(1024)
    arrays[1][64:128, 5] = 7
    for used, stretches in ((3, 1), (63, 1), (64, 2), (70, 2), (1023, 3)):
        ahead.use(used)
        for thread in _threads("pages-ahead"):
            thread.join()
        _check(arrays, stretches)
    assert (arrays[1][64:128, 5] == 7).all()
    assert arrays[1].sum() == 7 * 64
    assert not arrays[0].any()


def test_pages_come_slowly_until_somebody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(huge_pages, "STRETCHES_AHEAD", 1)
    monkeypatch.setattr("model_worker.cpu.huge_pages.time.sleep", pauses.append)
    arrays, ahead = _ahead(1024)
    ahead.use(3)
    for thread in _threads("pages-ahead"):
        thread.join()
    assert len(pauses) == len(arrays)
    assert min(pauses) > 0
    ahead._used = 2  # both are wanted at once
    ahead._provide(2)
    assert len(pauses) == len(arrays)
    _check(arrays, 2)


def test_while_nothing_is_used_more_come_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "IDLE_SECONDS", 0.01)
    for items, used, stretches in ((1024, 3, STRETCHES_AHEAD), (192, 3, 2), (60, 3, 0)):
        arrays, ahead = _ahead(items)
        ahead.use(used)
        for thread in [*_threads("pages-ahead"), *_threads("pages-when-idle")]:
            thread.join()
        _check(arrays, stretches)
