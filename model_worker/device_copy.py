"""Copies between the host and a device that the host does not wait for.

On CUDA the host's end of such a copy must be pinned memory; torch keeps a pinned buffer from being used again while a
copy of it is under way. On a CPU nothing is copied. Knows tensors only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Bytes: kernels read pieces that begin at multiples of it as quickly as whole tensors.
ALIGNMENT = 16


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy the array to the device, for work that is given to the device afterwards."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu" or not array.size:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def readable(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array in memory of the host that kernels on the device read where it is. It must be kept until these
    have run."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy the arrays to the device, in one copy: they are pieces of one tensor there, and keep their types."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    return packed_together(arrays, device)


def packed_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """As `upload_together`, by one copy whatever the device is."""
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
    packed = np.empty(starts[-1], np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    there = upload(packed, device)
    return [_piece(there, start, array) for array, start in zip(arrays, starts, strict=False)]


def _piece(packed: Tensor, start: int, array: NDArray[Any]) -> Tensor:
    """View the bytes from `start` on as the array that they are a copy of."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device=packed.device)
    return packed[start : start + array.nbytes].view(dtype).view(array.shape)


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
