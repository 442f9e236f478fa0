"""Columns that travel together arrive as they were, and memory that a device reads is not written meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interfaces import SamplingParams
from model_worker.device_copy import STEPS_IN_FLIGHT, Download, packed_together, upload_together
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.draw_triton import DrawStep
from model_worker.sampling.sampler import SamplerRows
from tests.model_worker.late_stream import LateStream

shapes = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=5)


@given(shapes=shapes, seed=st.integers(0, 1 << 30))
def test_columns_keep_their_shapes_and_values(shapes: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32) for shape in shapes]
    kinds = (np.int32, np.int64, np.float64, np.uint8)
    arrays = [array.astype(kinds[rng.integers(len(kinds))]) for array in arrays]
    for uploaded in (upload_together(arrays, torch.device("cpu")), packed_together(arrays, torch.device("cpu"))):
        for array, tensor in zip(arrays, uploaded, strict=True):
            np.testing.assert_array_equal(Download(tensor).wait(), array)
            assert tensor.numpy().dtype == array.dtype
            assert tuple(tensor.shape) == array.shape


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), seed=st.integers(0, 1 << 30))
def test_a_place_is_written_once_nothing_reads_it(sizes: list[int], seed: int) -> None:
    """Arrays of any size, of which several kernels read each, on a device that ends them at any time."""
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        stream = LateStream(monkeypatch)
        ring = stream.ring(int(rng.integers(1, 4)))
        for size in sizes:
            array = rng.integers(-(1 << 31), 1 << 31, (size, 2), dtype=np.int64).astype(np.int32)
            with ring.lent(array) as there:
                np.testing.assert_array_equal(there.numpy(), array)
                for _ in range(rng.integers(1, 4)):
                    stream.read(there)
            stream.run(int(rng.integers(0, stream.launched - stream.ended + 1)))
        stream.run(stream.launched - stream.ended)
    assert not stream.overwritten


def test_the_late_stream_tells_what_is_written_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LateStream(monkeypatch)
    with stream.ring().lent(np.arange(4)) as there:
        stream.read(there)
    there.zero_()
    stream.run(1)
    assert stream.overwritten == [0]


def test_steps_in_flight_wait_for_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wait is that of the first step beyond them."""
    stream = LateStream(monkeypatch)
    ring = stream.ring()
    for step in range(STEPS_IN_FLIGHT + 2):
        assert stream.waits == 0
        with ring.lent(np.full(3, step)) as there:
            stream.read(there)
    assert (stream.waits, stream.ended) == (1, 1)


class LateKernels:
    """Kernels of a draw that read bitmasks where the host has them, some time after their launch."""

    reads_host_memory = True

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self.fails = False

    def draw(self, logits: torch.Tensor, step: DrawStep) -> tuple[torch.Tensor, None]:
        assert step.masks is not None
        self._stream.read(step.masks)
        if self.fails:
            raise torch.OutOfMemoryError("no memory for a draw")
        return torch.zeros(len(logits), dtype=torch.int64), None


def test_masks_of_grammars_stay_until_the_draw_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a step that failed behind the launch of its first kernel, and is launched again in parts."""
    stream = LateStream(monkeypatch)
    sampler = SamplerRows(2, 70, torch.device("cpu"), counts_there=True)
    kernels = LateKernels(stream)
    sampler._device_draw.kernels = kernels  # type: ignore[assignment]
    sampler._device_draw.lent_masks = stream.ring()
    none, rows, positions = np.empty(0, np.int32), np.arange(2, dtype=np.int32), np.zeros(2, np.int64)
    for row in range(2):
        sampler.join(row, SamplingParams(temperature=0.0), [], none, none)
    rng = np.random.default_rng()
    for step in range(7):
        masks = RowMasks(np.arange(2), rng.integers(0, 1 << 30, (2, 3)).astype(np.int32))
        arguments = torch.zeros(2, 70), rows, positions, None, masks
        kernels.fails = step % 3 == 1
        if kernels.fails:
            with pytest.raises(torch.OutOfMemoryError):
                sampler.sample_ahead(*arguments)
        else:
            sampler.sample_ahead(*arguments)
        # The mask process writes its own memory; the step's copy is not read again.
        masks.words[:] = 0
    stream.run(stream.launched - stream.ended)
    assert stream.launched == 7
    assert stream.waits
    assert not stream.overwritten
