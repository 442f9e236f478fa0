"""The ways to run a step. `executors_for` lists those of a device, and the first that accepts a step runs it:

Isolation     every step while there are rows that must not depend on their neighbours
Speculation   a single row whose next tokens can be guessed, where the step leaves room for guesses
OverlapCpu    greedy rows, on a CPU: launched before the tokens of the step before are read
OverlapCuda   rows that are sampled on the device: the same on CUDA
Synchronous   every step; the others are faster
"""

from __future__ import annotations

from model_worker.execution.base import DeviceStep, Executor
from model_worker.execution.isolation import Isolation
from model_worker.execution.overlap_cpu import OverlapCpu
from model_worker.execution.overlap_cuda import OverlapCuda
from model_worker.execution.speculation import Speculation
from model_worker.execution.synchronous import Synchronous


def executors_for(shared: DeviceStep, overlap: str = "off", most_guesses: int = 0) -> list[Executor]:
    """Make the executors of a device, rarest first.

    `overlap` is the type of the device, or "off": then each step waits for its tokens. A CPU's backend must have
    `launch` for it. Up to `most_guesses` tokens of a row are guessed, but not on CUDA.
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
