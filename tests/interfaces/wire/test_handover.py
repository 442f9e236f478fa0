"""Arrays that are given away: their reader removes the segment, and their maker does when none came."""

from __future__ import annotations

import numpy as np
import pytest

from interfaces import Handover, PooledValues, SharedMemoryArray
from interfaces.wire.handover import SECONDS_KEPT
from interfaces.wire.shared_memory import DIRECTORY, MESSAGE_THRESHOLD, SharedMemoryError
from tests.scheduler.clock import Clock

LARGE = np.random.default_rng(1).random((MESSAGE_THRESHOLD // 32, 8), np.float32)


def given(handover: Handover) -> tuple[PooledValues, SharedMemoryArray]:
    lengths = np.ones(len(LARGE), np.int32)
    values = PooledValues(handover.give(LARGE), lengths)
    assert isinstance(values.values, SharedMemoryArray)
    return values, values.values


def test_small_arrays_travel_inline() -> None:
    small = np.ones((2, 2), np.float32)
    assert Handover().give(small) is small


def test_the_reader_has_the_values_and_removes_the_segment() -> None:
    handover = Handover()
    values, segment = given(handover)
    assert (DIRECTORY / segment.name).exists()
    taken = values.take()
    assert not (DIRECTORY / segment.name).exists()
    np.testing.assert_array_equal(taken.array, LARGE)
    assert taken.take() is taken
    with pytest.raises(SharedMemoryError, match="cannot be opened"):
        values.take()


def test_values_that_no_reader_wants_are_removed() -> None:
    handover = Handover()
    values, segment = given(handover)
    values.discard()
    values.discard()
    assert not (DIRECTORY / segment.name).exists()


def test_the_maker_removes_what_no_reader_took() -> None:
    clock = Clock()
    handover = Handover(clock)
    old = given(handover)[1]
    clock.advance(SECONDS_KEPT - 1)
    handover.forget_old()
    young = given(handover)[1]
    assert (DIRECTORY / old.name).exists()
    clock.advance(2)
    handover.forget_old()
    assert not (DIRECTORY / old.name).exists()
    assert (DIRECTORY / young.name).exists()
    del handover
    assert not (DIRECTORY / young.name).exists()
