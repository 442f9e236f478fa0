"""The calls of CUDA's driver, of which each process has a stand-in with the same C types."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import pytest

from model_worker.keeper.cuda_pieces import Access, CudaPieces, Mapped, Properties
from tests.model_worker.keeper.driver import UNIT, Driver


def content(mapped: Mapped) -> Any:
    """The bytes of a mapped piece, as torch finds them."""
    facts: Any = mapped.__cuda_array_interface__
    (address, read_only), (size,) = facts["data"], facts["shape"]
    assert (facts["typestr"], read_only) == ("|u1", False)
    return (ctypes.c_uint8 * size).from_address(address)


def test_structures_are_as_long_as_those_of_cuda() -> None:
    assert (ctypes.sizeof(Properties), ctypes.sizeof(Access)) == (32, 12)


def test_a_piece_outlives_the_worker_that_filled_it_and_the_keeper() -> None:
    keepers, firsts, seconds = Driver(), Driver(), Driver()
    keeper, first, second = (CudaPieces(1, driver) for driver in (keepers, firsts, seconds))
    handle = keeper.make(2 * UNIT)
    descriptor = keeper.export(handle)
    mapped = first.map(descriptor, 2 * UNIT, writable=True)
    os.close(descriptor)
    content(mapped)[UNIT] = 17
    assert firsts.files == {}, "the mapping alone keeps the memory"
    del mapped
    assert firsts.mapped == firsts.reserved == {}
    assert firsts.waits == 1, "nothing is unmapped that a kernel may read"
    descriptor = keeper.export(handle)
    keeper.free(handle)
    assert keepers.files == {}
    again = second.map(descriptor, 2 * UNIT, writable=False)
    os.close(descriptor)
    assert content(again)[UNIT] == 17
    assert seconds.mapped.keys() == seconds.reserved.keys()
    assert (firsts.contexts, firsts.retained) == ([], 1), "torch's context is as it was"


def test_a_piece_is_unmapped_even_after_a_kernel_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    pieces = CudaPieces(1, driver)
    descriptor = pieces.export(pieces.make(UNIT))
    mapped = pieces.map(descriptor, UNIT, writable=True)
    os.close(descriptor)
    driver.broken = True
    del mapped
    assert driver.mapped == driver.reserved == {}
    assert (driver.contexts, driver.retained) == ([], 1)
    said = "while weights that were kept are unmapped, cuCtxSynchronize says an illegal memory access was encountered"
    assert caplog.messages == [f"{said} (700)"]


def test_a_piece_is_mapped_by_a_driver_that_knows_no_memory_to_read_alone() -> None:
    driver = Driver(reads_alone=False)
    pieces = CudaPieces(1, driver)
    descriptor = pieces.export(pieces.make(UNIT))
    mapped = pieces.map(descriptor, UNIT, writable=False)
    os.close(descriptor)
    assert content(mapped)[0] == 0
    assert driver.mapped


def test_a_full_gpu_is_an_error_with_the_drivers_words() -> None:
    with pytest.raises(OSError, match=r"cuMemCreate says out of memory \(2\)") as caught:
        CudaPieces(1, Driver(most=UNIT)).make(2 * UNIT)
    assert caught.value.errno == errno.ENOMEM


def test_what_cannot_be_mapped_leaves_nothing() -> None:
    driver = Driver()
    pieces = CudaPieces(1, driver)
    descriptor = pieces.export(pieces.make(UNIT))
    with pytest.raises(OSError, match="cuMemMap says invalid argument"):
        pieces.map(descriptor, 2 * UNIT, writable=True)
    os.close(descriptor)
    assert driver.mapped == driver.reserved == {}
    assert len(driver.files) == 1


def test_a_gpu_that_cannot_share_memory_says_so() -> None:
    with pytest.raises(OSError, match="the GPU or its driver cannot share memory by descriptors"):
        CudaPieces(1, Driver(able=False))
    with pytest.raises(OSError, match="cuDeviceGet says invalid device ordinal"):
        CudaPieces(2, Driver())


def test_a_machine_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_worker.keeper.cuda_pieces._LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(OSError, match=r"CUDA's driver shares no memory here \(libno-such-driver"):
        CudaPieces(0)
