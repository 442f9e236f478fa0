"""Copies between the host and a device that the host does not wait for.

On CUDA the host's end of such a copy must be pinned memory. Each copy has a buffer of its own: torch's allocator
records an event behind the copy, and gives the buffer out again only once the device has passed it. It knows nothing of
kernels that read the host's memory themselves: `HostRing` is for these. On a CPU nothing is copied. Knows tensors only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Bytes: kernels read pieces that begin at multiples of it as quickly as whole tensors.
ALIGNMENT = 16
# Steps that a worker launches before it reads the first of them.
STEPS_IN_FLIGHT = 2


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy the array to the device, for work that is given to the device afterwards."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu" or not array.size:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy the arrays to the device, in one copy: they are pieces of one tensor there, and keep their types."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    return packed_together(arrays, device)


def packed_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """As `upload_together`, by one copy whatever the device is."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    packed = pinned_bytes(end) if device.type == "cuda" else torch.empty(end, dtype=torch.uint8)
    memory = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    there = packed.to(device, non_blocking=True)
    # The whole of it as each type, so that a piece is a slice.
    typed = {dtype: there.view(_torch_type(dtype)) for dtype in {array.dtype for array in arrays}}
    pieces = []
    for array, start in zip(arrays, starts, strict=True):
        first = start // array.itemsize
        piece = typed[array.dtype][first : first + array.size]
        pieces.append(piece if array.ndim == 1 else piece.view(array.shape))
    return pieces


@cache
def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Mark:
    """A place in the queue of a device, and the time at which the device reached it."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter_ns()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has reached the mark."""
        if self._event is not None:
            self._event.synchronize()

    def us_since(self, earlier: Mark) -> int:
        """Return microseconds of the device's time since an earlier mark; both must have been reached."""
        if self._event is None or earlier._event is None:
            return (self._time - earlier._time) // 1000
        return int(earlier._event.elapsed_time(self._event) * 1000)


class Download:
    """A copy from a device to the host, under way; `done` is its end."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        self.done = Mark(tensor.device)

    def wait(self) -> NDArray[Any]:
        """Return the values, once they are here."""
        self.done.wait()
        return np.asarray(self._host.numpy())


class HostRing:
    """Memory of the host that kernels on a device read where it is: a place for each step in flight, and one to write.

    Behind the work that reads a place lies an event. It is waited for before the place is written again; the device has
    passed it long before, unless more steps are in flight than there are places.
    """

    def __init__(self, device: torch.device, places: int = STEPS_IN_FLIGHT + 1) -> None:
        self.device = device
        self._places = [_Place() for _ in range(places)]
        self._next = 0

    @contextmanager
    def lent(self, array: NDArray[Any]) -> Iterator[Tensor]:
        """Lend the array to the work that is launched on the current stream within the context, however it ends."""
        if self.device.type != "cuda":
            yield torch.from_numpy(array)
            return
        place = self._places[self._next]
        self._next = (self._next + 1) % len(self._places)
        there = place.written(array)
        try:
            yield there
        finally:
            place.read = Mark(self.device)


class _Place:
    """One place of a ring, which grows with what is written to it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        # Behind all that reads what is there.
        self.read: Mark | None = None

    def written(self, array: NDArray[Any]) -> Tensor:
        """Return a copy of the array, once nothing reads what was there."""
        if self.read is not None:
            self.read.wait()
        if len(self._memory) < array.nbytes:
            self._memory = pinned_bytes(array.nbytes)
        there = self._memory[: array.nbytes].view(_torch_type(array.dtype)).view(array.shape)
        there.copy_(torch.from_numpy(array))
        return there


def pinned_bytes(count: int) -> Tensor:
    """Return memory of the host that a GPU reads by itself."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)
