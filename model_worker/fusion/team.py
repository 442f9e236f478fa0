"""A team of threads that runs one compiled function together, one call per core, and meets inside it at barriers.

Knows threads and atomics. A decode step has hundreds of points where all cores must wait for each other; waking a
sleeping thread at each would cost more than the work between them, so the team is woken once per step and spins in
between. A member that waits for long gives its core away, so that a team never fights with other processes for long.
Does not know what the function does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numpy.typing import NDArray

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

# Some tens of microseconds: what the slowest of two equal shares takes longer than the other.
_SPINS = 4000


@intrinsic
def _arrive(typing: Any, counter: Any) -> Any:
    """Add one to counter[0]; everything written before is seen by who reads the sum."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(counter), codegen


@intrinsic
def _arrived(typing: Any, counter: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(data, "acquire", 8)

    return types.int64(counter), codegen


@intrinsic
def _give_way(typing: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), ())
        builder.call(numba.core.cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), ())
        return context.get_dummy_value()

    return types.void(), codegen


@njit(nogil=True, cache=True)
def meet(counter: Any, cores: int, meeting: int) -> int:
    """Wait until all cores have come to this meeting, which is the number that the last one returned (first 0).

    Returns the number of the next.
    """
    if cores > 1:
        _arrive(counter)
        spins = 0
        while _arrived(counter) < cores * (meeting + 1):
            spins += 1
            if spins > _SPINS:
                _give_way()
    return meeting + 1


class Team:
    """`cores` threads, the caller's own among them. The others sleep between calls."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self._counter: NDArray[np.int64] = np.zeros(8, np.int64)  # a cache line of its own
        self._task: Callable[[int], None] | None = None
        self._busy = threading.Lock()
        self._starts = [threading.Semaphore(0) for _ in range(cores - 1)]
        self._ends = threading.Semaphore(0)
        for core in range(1, cores):
            threading.Thread(target=self._member, args=(core,), name=f"team-{core}", daemon=True).start()

    def run(self, function: Any, *arguments: Any) -> None:
        """function(core, cores, counter, *arguments) on every core. It must be compiled, and must not raise."""
        with self._busy:
            self._counter[0] = 0
            self._task = lambda core: function(core, self.cores, self._counter, *arguments)
            for start in self._starts:
                start.release()
            self._task(0)
            for _ in self._starts:
                self._ends.acquire()

    def _member(self, core: int) -> None:
        while True:
            self._starts[core - 1].acquire()
            assert self._task is not None
            self._task(core)
            self._ends.release()


@functools.cache
def team(cores: int) -> Team:
    """The process's team of so many cores: threads are made once."""
    return Team(cores)
