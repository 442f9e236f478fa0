"""The ways to run a step. `executors_for` lists those of a device, and the first that accepts a step runs it:

Isolation     rows that must not depend on their neighbours: every step, while there are such rows
Speculation   a single row whose next tokens can be guessed, where the step leaves room for guesses
OverlapCpu    greedy rows, on a CPU: launched before the tokens of the step before are read
OverlapCuda   rows that are sampled on the device: the same on CUDA
Synchronous   everything else; what the others compute, it computes too
"""

from __future__ import annotations

from model_worker.execution.base import DeviceStep, Executor
from model_worker.execution.isolation import Isolation
from model_worker.execution.overlap_cpu import OverlapCpu
from model_worker.execution.overlap_cuda import OverlapCuda
from model_worker.execution.speculation import Speculation
from model_worker.execution.synchronous import Synchronous


def executors_for(shared: DeviceStep, overlap: str = "off", most_guesses: int = 0) -> list[Executor]:
    """The executors of a device, rarest first.

    `overlap` is the type of the device, or "off": then each step waits for its tokens. Up to `most_guesses` tokens of a
    row are guessed, but not on CUDA.
    """
    synchronous = Synchronous(shared)
    executors: list[Executor] = [Isolation(shared, synchronous)]
    if overlap == "cuda":
        return [*executors, OverlapCuda(shared), synchronous]
    if most_guesses:
        executors.append(Speculation(shared, most_guesses))
    if overlap == "cpu":
        executors.append(OverlapCpu(shared))
    return [*executors, synchronous]
