"""The ways to run a step. `executors_for` lists those of a device, and the first that accepts a step runs it:

Isolation     every step while there are rows that must not depend on their neighbours
Speculation   rows in decode, where the step has room for guesses at their next tokens, and these pay
OverlapCpu    greedy rows, on a CPU: launched before the tokens of the step before are read
OverlapCuda   rows that are sampled on the device: the same on CUDA
Synchronous   every step; the others are faster
"""

from __future__ import annotations

from collections.abc import Sequence

from model_worker.drafters.base import Drafter, ModelDrafter
from model_worker.drafters.budget import FixedBudget, LearntBudget
from model_worker.drafters.several import Drafters
from model_worker.execution.base import DeviceStep, Executor
from model_worker.execution.isolation import Isolation
from model_worker.execution.overlap_cpu import OverlapCpu
from model_worker.execution.overlap_cuda import OverlapCuda
from model_worker.execution.speculation import Speculation
from model_worker.execution.synchronous import Synchronous


def executors_for(
    shared: DeviceStep,
    overlap: str = "off",
    most_guesses: int = 0,
    learns: bool = False,
    drafters: Sequence[Drafter] = (),
    models: Sequence[ModelDrafter] = (),
) -> list[Executor]:
    """Make the executors of a device, rarest first.

    `overlap` is the type of the device, or "off": then each step waits for its tokens. A CPU's backend must have
    `launch` for it. Up to `most_guesses` tokens of a row are guessed, by `drafters` and, where these know little, by
    `models`: always as many as there are, or, if the worker `learns`, as many as pay. Nothing is guessed where a
    row's bits depend on what else is in its pass.
    """
    synchronous = Synchronous(shared)
    executors: list[Executor] = [Isolation(shared, synchronous)]
    if overlap == "cuda":
        return [*executors, OverlapCuda(shared), synchronous]
    if guesses(shared, most_guesses):
        budget = LearntBudget(most_guesses, shared.times) if learns else FixedBudget(most_guesses)
        shared.drafters = Drafters(shared.rows, drafters, budget, shared.times, models)
        executors.append(Speculation(shared, shared.drafters, overlap == "cpu"))
    if overlap == "cpu":
        executors.append(OverlapCpu(shared))
    return [*executors, synchronous]


def guesses(shared: DeviceStep, most_guesses: int) -> bool:
    """Whether a worker uses room for guesses."""
    backend = shared.backend
    return most_guesses > 0 and backend.row_invariant and backend.device.type == "cpu"
