"""Blocks leave a KV cache and come back: the same bytes, or none."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from interfaces import KvMoved, Step
from model_worker.kv_cache import KVCache, KVLayout, LayerShape
from model_worker.kv_spill import mover as mover_module
from model_worker.kv_spill.blocks import Blocks, DeviceBlocks, HostBlocks
from model_worker.kv_spill.mover import KvMover
from model_worker.kv_spill.places import DiskPlace, MemoryPlace, Place
from model_worker.kv_spill.start import kv_mover
from model_worker.rows import StepError

CPU = torch.device("cpu")
NONE = np.empty(0, np.int32)
BLOCKS = 12
SLOTS = 8


def layout(dtype: torch.dtype = torch.float32) -> KVLayout:
    return KVLayout((LayerShape(2, 6, 4), LayerShape(1, 8, 8)), dtype)


def filled(dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache(layout(dtype), BLOCKS, 4, CPU)
    for tensor in (*cache.k, *cache.v):
        tensor.copy_(torch.randint(1, 100, tensor.shape))
    return cache


def contents(cache: KVCache, block: int) -> list[torch.Tensor]:
    return [tensor[block].clone() for tensor in (*cache.k, *cache.v)]


def holds(cache: KVCache, block: int, wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(here, there) for here, there in zip(contents(cache, block), wanted, strict=True))


def step(save: list[tuple[int, int]] | None = None, load: list[tuple[int, int, int]] | None = None) -> Step:
    saves = None if save is None else np.array([(*pair, 0) for pair in save], np.int32)
    loads = None if load is None else np.array(load, np.int32)
    return Step(1, 0, 1, NONE, None, NONE.reshape(0, 3), NONE, [], save=saves, load=loads)


def report(mover: KvMover) -> KvMoved | None:
    mover.finish()
    told = mover.take()
    return told[0] if told else None


@pytest.fixture(params=["host", "device"])
def blocks_of(request: pytest.FixtureRequest) -> type[HostBlocks] | type[DeviceBlocks]:
    """A GPU's way, too, on the memory of a CPU."""
    return HostBlocks if request.param == "host" else DeviceBlocks


def made(cache: KVCache, kind: type[HostBlocks] | type[DeviceBlocks]) -> Blocks:
    return HostBlocks(cache) if kind is HostBlocks else DeviceBlocks(cache, CPU)


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    size = HostBlocks(KVCache(layout(), 1, 4, CPU)).block_bytes
    return DiskPlace(tmp_path / "spill", size) if request.param == "disk" else MemoryPlace(SLOTS, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_a_block_comes_back_as_it_was(dtype: torch.dtype, blocks_of: type[HostBlocks], tmp_path: Path) -> None:
    cache = filled(dtype)
    blocks = made(cache, blocks_of)
    assert blocks.block_bytes == cache.layout.bytes_per_block(4)
    mover = KvMover(blocks, DiskPlace(tmp_path, blocks.block_bytes), SLOTS, BLOCKS, 0, 0)
    before = [contents(cache, block) for block in range(BLOCKS)]
    mover.order(step(save=[(3, 0), (5, 7)]))
    assert report(mover) is None, "there is nothing to tell of what went well"
    for tensor in (*cache.k, *cache.v):
        tensor.zero_()
    mover.order(step(load=[(9, 7, 2), (9, 0, 11)]))
    told = report(mover)
    assert told is not None
    assert (told.tickets.tolist(), told.blocks.tolist()) == ([9], [2])
    assert holds(cache, 2, before[5])
    assert holds(cache, 11, before[3])
    assert not any(tensor[block].any() for tensor in (*cache.k, *cache.v) for block in (0, 1, 3, 5, 10))


def test_what_is_saved_is_what_was_there_before_the_step(place: Place) -> None:
    cache = filled()
    mover = KvMover(HostBlocks(cache), place, SLOTS, BLOCKS, 0, 0)
    before = contents(cache, 3)
    mover.order(step(save=[(3, 0)]))
    for tensor in (*cache.k, *cache.v):
        tensor[3] = 0
    mover.order(step(load=[(1, 0, 4)]))
    mover.finish()
    assert holds(cache, 4, before)


def test_a_slot_is_read_before_a_later_step_writes_it(place: Place) -> None:
    cache = filled()
    mover = KvMover(HostBlocks(cache), place, SLOTS, BLOCKS, 0, 0)
    first, second = contents(cache, 0), contents(cache, 1)
    mover.order(step(save=[(0, 2)]))
    mover.order(step(load=[(1, 2, 5)]))
    mover.order(step(save=[(1, 2)], load=[(2, 2, 6)]))
    mover.finish()
    assert holds(cache, 5, first)
    assert holds(cache, 6, second), "saves of a step come before its loads"


def test_nobody_else_can_open_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    place = DiskPlace(folder, 100)
    place.write(0, np.full(100, 7, np.uint8))
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.fstat(place._file).st_mode & 0o777 == 0o600
    assert os.fstat(place._file).st_nlink == 0


def test_a_file_system_without_such_files_gets_one_whose_name_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refused(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refused)
    (tmp_path / "tokenyard-kv-left").write_text("of a process that was killed")
    place = DiskPlace(tmp_path, 10)
    monkeypatch.undo()
    place.write(3, np.arange(10, dtype=np.uint8))
    into = np.empty(10, np.uint8)
    place.read(3, into)
    assert into.tolist() == list(range(10))
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(place._file).st_mode & 0o777 == 0o600


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"kv_spill_dir '.*file' cannot be written to"):
        DiskPlace(tmp_path / "file", 10)


def test_bytes_that_have_changed_are_not_loaded(tmp_path: Path) -> None:
    cache = filled()
    blocks = HostBlocks(cache)
    place = DiskPlace(tmp_path, blocks.block_bytes)
    mover = KvMover(blocks, place, SLOTS, BLOCKS, 0, 0)
    mover.order(step(save=[(0, 0), (1, 1), (2, 2)]))
    mover.finish()
    before, kept = contents(cache, 0), contents(cache, 9)
    os.pwrite(place._file, b"\xff", blocks.block_bytes + 5)
    mover.order(step(load=[(1, 0, 8), (1, 1, 9), (1, 2, 10)]))
    told = report(mover)
    assert told is not None
    assert (told.blocks.tolist(), told.broken.tolist()) == ([1], [1])
    assert holds(cache, 8, before)
    assert holds(cache, 9, kept), "nothing was written there"


def test_a_file_that_was_cut_off_is_not_loaded(tmp_path: Path) -> None:
    blocks = HostBlocks(filled())
    place = DiskPlace(tmp_path, blocks.block_bytes)
    mover = KvMover(blocks, place, SLOTS, BLOCKS, 0, 0)
    mover.order(step(save=[(0, 0), (1, 1)]))
    mover.finish()
    os.ftruncate(place._file, blocks.block_bytes + 1)
    mover.order(step(load=[(1, 0, 8), (1, 1, 9)]))
    told = report(mover)
    assert told is not None
    assert (told.blocks.tolist(), told.broken.tolist(), told.full) == ([1], [1], False)


@pytest.fixture
def file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_once(tmp_path: Path, file_limit: None, caplog: pytest.LogCaptureFixture) -> None:
    cache = filled()
    blocks = HostBlocks(cache)
    mover = KvMover(blocks, DiskPlace(tmp_path, blocks.block_bytes), SLOTS, BLOCKS, 0, 0)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * blocks.block_bytes, most))
    mover.order(step(save=[(0, 0), (1, 1), (2, 2), (3, 3)]))
    told = report(mover)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert told is not None
    assert (told.broken.tolist(), told.full) == ([2, 3], True)
    [line] = [record.getMessage() for record in caplog.records]
    assert "takes no block of the KV cache" in line
    assert "it grows no more" in line
    mover.order(step(load=[(1, 1, 8), (1, 2, 9)]))
    told = report(mover)
    assert told is not None
    assert told.blocks.tolist() == [1]


class SlowPlace(MemoryPlace):
    """Waits until it may write."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        super().__init__(slots, slot_bytes)
        self.may = threading.Event()

    def write(self, slot: int, data: NDArray[np.uint8]) -> None:
        assert self.may.wait(60)
        super().write(slot, data)


def test_what_the_disk_is_too_slow_for_is_skipped_and_never_mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    blocks = HostBlocks(cache)
    monkeypatch.setattr(mover_module, "WAITING_BYTES", 2 * blocks.block_bytes)
    place = SlowPlace(SLOTS, blocks.block_bytes)
    mover = KvMover(blocks, place, SLOTS, BLOCKS, 0, 0)
    mover.order(step(save=[(0, 0), (1, 1), (2, 2)]))
    mover.order(step(save=[(3, 0)], load=[(1, 0, 8), (1, 1, 9)]))
    began = time.monotonic()
    assert mover.take() == []
    assert time.monotonic() - began < 30
    place.may.set()
    told = report(mover)
    assert told is not None
    assert told.skipped.tolist() == [2, 0]
    assert told.blocks.tolist() == [0], "slot 0 was to hold block 3, and holds nothing"
    mover.order(step(save=[(4, 5)], load=[(2, 5, 8)]))
    told = report(mover)
    assert told is not None
    assert told.blocks.tolist() == [1], "there is room again"


def test_another_registration_finds_all_slots_empty(place: Place) -> None:
    mover = KvMover(HostBlocks(filled()), place, SLOTS, BLOCKS, 0, 0)
    mover.order(step(save=[(0, 0)], load=[(1, 0, 8)]))
    mover.forget()
    assert mover.take() == [], "the answer was for the one before"
    mover.order(step(load=[(1, 0, 8)]))
    told = report(mover)
    assert told is not None
    assert told.blocks.tolist() == [0]


@pytest.mark.parametrize(
    "wrong", [step(save=[(BLOCKS, 0)]), step(save=[(0, SLOTS)]), step(load=[(1, -1, 0)]), step(load=[(1, 0, BLOCKS)])]
)
def test_places_that_there_are_not_are_a_defect_of_the_sender(wrong: Step, place: Place) -> None:
    mover = KvMover(HostBlocks(filled()), place, SLOTS, BLOCKS, 0, 0)
    with pytest.raises(StepError, match="outside 0"):
        mover.order(wrong)


def test_settings_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    cache = filled()
    with pytest.raises(ValueError, match="wants kv_spill_dir"):
        kv_mover(cache, BLOCKS, CPU, 1 << 20, "", 0, 0)
    with pytest.raises(ValueError, match="raise it"):
        kv_mover(cache, BLOCKS, CPU, 10, str(tmp_path), 0, 0)
    size = HostBlocks(cache).block_bytes
    assert kv_mover(cache, BLOCKS, CPU, 5 * size + 1, str(tmp_path), 0, 0).slots == 5
