"""How much of a GPU's memory the KV cache may take: what weights, the largest step and its recording leave of a share.

Knows numbers of bytes; `CudaMemory` reads them. Does not know models or steps: the caller rehearses those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

GIB = 1 << 30
# Of the whole GPU, for all workers on it. The rest is for the driver's context, libraries and fragmentation.
SHARE = 0.9
# Of what is free now, where other processes hold some of the share: they may still grow a little.
_SHARE_OF_FREE = 0.98


class DeviceMemory(Protocol):
    """The memory of one GPU, in bytes."""

    @property
    def total(self) -> int: ...

    @property
    def free(self) -> int:
        """What no process holds."""
        ...

    @property
    def reserved(self) -> int:
        """What this process' allocator holds, tensors and what it keeps for later ones, and kept weights."""
        ...

    @property
    def allocated(self) -> int:
        """What this process' tensors take."""
        ...

    def peak_of(self, work: Callable[[], None]) -> int:
        """Run `work`. Returns the most that tensors took meanwhile, beyond those from before."""
        ...


class CudaMemory:
    """DeviceMemory of a CUDA device, as torch knows it, and what this process uses of a keeper's memory."""

    def __init__(self, device: torch.device, kept: int = 0) -> None:
        """`kept` are the bytes of weights that a keeper has (keeper/), of which torch's allocator knows nothing."""
        self._device = device
        self._kept = kept

    @property
    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    @property
    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    @property
    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device)) + self._kept

    @property
    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device)) + self._kept

    def peak_of(self, work: Callable[[], None]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = int(torch.cuda.memory_allocated(self._device))
        work()
        torch.cuda.synchronize(self._device)
        peak = int(torch.cuda.max_memory_allocated(self._device)) - before
        torch.cuda.empty_cache()
        return peak


@dataclass(frozen=True)
class MemoryPlan:
    """Where a worker's part of a GPU's memory goes, in bytes."""

    budget: int  # of this worker
    weights: int
    step: int  # temporaries of the largest step
    recorded: int  # the same of recorded steps, which keep them, and their logits
    total: int  # of the GPU
    adapters: int = 0  # factors of adapters

    @property
    def kv_cache(self) -> int:
        return self.budget - self.weights - self.step - self.recorded - self.adapters

    def with_adapters(self, wanted: int | None) -> MemoryPlan:
        """Return a plan that leaves so many bytes to adapters; None: as many as docs/gpu.md says of `auto`."""
        left = max(0, self.kv_cache)
        return replace(self, adapters=min(max(left // 16, GIB), left // 4) if wanted is None else wanted)

    def __str__(self) -> str:
        return (
            f"a GPU of {_gib(self.total)}, of which {_gib(self.budget)} are this worker's: weights "
            f"{_gib(self.weights)}, the largest step {_gib(self.step)}, recorded steps {_gib(self.recorded)}, "
            f"{f'adapters {_gib(self.adapters)}, ' if self.adapters else ''}K/V {_gib(self.kv_cache)}"
        )


def plan_memory(
    memory: DeviceMemory, workers: int, largest_step: Callable[[], None], decode_step: Callable[[], None]
) -> MemoryPlan:
    """Measure what steps take, once the weights are on the device. So many `workers` share the GPU."""
    weights = memory.allocated
    step = memory.peak_of(largest_step)
    recorded = memory.peak_of(decode_step)
    # Held by this process, or by none: more is not to be had, whatever the share.
    reachable = int(memory.free * _SHARE_OF_FREE) + memory.reserved
    budget = min(int(memory.total * SHARE) // workers, reachable)
    return MemoryPlan(budget, weights, step, recorded, memory.total)


def is_for_want_of_memory(error: Exception) -> bool:
    """Whether an error of torch is about a GPU's memory: that of its allocator, or the driver's own."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def explain_no_memory(memory: DeviceMemory, error: Exception) -> tuple[str, bool]:
    """Say with numbers and remedies that a worker cannot start, and whether a later start may fare better."""
    reason = str(error).splitlines()[0]
    if not isinstance(error, torch.OutOfMemoryError):
        # The driver has no room for this process, so it cannot be asked for numbers either.
        text = "the GPU has no memory left even to begin on: end the processes that hold it (nvidia-smi names them)"
        return f"{text}, or use another GPU ({reason})", True
    held = memory.reserved
    others = max(0, memory.total - memory.free - held)
    text = (
        f"the GPU has no memory left for this worker: of {_gib(memory.total)} it holds {_gib(held)}, and other "
        f"processes and the driver {_gib(others)}; use a GPU with more memory or a smaller model, lower "
        f"max_batch_tokens, max_running or kv_memory, or end the other processes ({reason})"
    )
    return text, others > memory.total * (1 - SHARE)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
