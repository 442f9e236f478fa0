"""A team of threads that runs one compiled function together, one call per core, and meets inside it at barriers.

Knows threads and atomics. A decode step has hundreds of points where all cores must wait for each other; waking a
sleeping thread at each would cost more than the work between them, so the team is woken once per step and spins in
between. A member that waits for long sleeps after all: then another process has taken a core, and the sleeper's own
core may be what that process needs. Does not know what the function does. Linux only.
"""

from __future__ import annotations

import functools
import platform
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

_LINE = 8
"""Numbers in a line of memory: what cores count for different reasons must not share one."""
# Some tens of microseconds: what the slowest of two equal shares takes longer than the other.
_SPINS = 40_000
# Of the system call: 98 in the table that Linux gives to all newer architectures.
_FUTEX_NUMBER = 202 if platform.machine() == "x86_64" else 98
_PRIVATE = 128
_WAIT, _WAKE = 0 | _PRIVATE, 1 | _PRIVATE


@intrinsic
def _add(typing: Any, counter: Any, amount: Any) -> Any:
    """Add to counter[0], and return what it was; everything written before is seen by who reads the sum."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        # Stronger than "acq_rel": who falls asleep and who wakes sleepers each write one number and read the other's.
        return builder.atomic_rmw("add", data, args[1], "seq_cst")

    return types.int64(counter, types.int64), codegen


@intrinsic
def _arrived(typing: Any, counter: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(data, "seq_cst", 8)

    return types.int64(counter), codegen


@intrinsic
def _futex(typing: Any, counter: Any, operation: Any, value: Any) -> Any:
    """Linux's futex on the lower half of counter[0]: sleep while that is `value`, or wake so many sleepers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        long, pointer = ir.IntType(64), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(long, (long,) * 4 + (pointer, pointer, long))
        system_call = numba.core.cgutils.get_or_insert_function(builder.module, kind, "syscall")
        address, nothing = builder.ptrtoint(data, long), ir.Constant(pointer, None)
        number = ir.Constant(long, _FUTEX_NUMBER)
        builder.call(system_call, (number, address, args[1], args[2], nothing, nothing, ir.Constant(long, 0)))
        return context.get_dummy_value()

    return types.void(counter, types.int64, types.int64), codegen


@njit(nogil=True, cache=True)
def meet(counter: Any, cores: int, meeting: int) -> int:
    """Wait until all cores have come to this meeting, which is the number that the last one returned (first 0).

    Returns the number of the next.
    """
    if cores > 1:
        everyone, sleepers = cores * (meeting + 1), counter[1:]
        if _add(counter, 1) + 1 == everyone:
            if _arrived(sleepers) > 0:
                _futex(counter, _WAKE, cores)
        else:
            spins = 0
            while _arrived(counter) < everyone and spins < _SPINS:
                spins += 1
            if spins == _SPINS:
                _add(sleepers, 1)
                here = _arrived(counter)
                while here < everyone:
                    _futex(counter, _WAIT, here)
                    here = _arrived(counter)
                _add(sleepers, -1)
    return meeting + 1


@njit(nogil=True, cache=True)
def claim(counter: Any, claimed: int) -> int:
    """The next piece of work to take: how many claims there were before, of any core, less those `claimed` earlier.

    A core that waits for others, or runs slower, takes fewer. All cores go on until there is no piece left; then they
    must meet before they claim of the next work, which begins at `claimed_after`.
    """
    before: int = _add(counter[_LINE:], 1)
    return before - claimed


@njit(nogil=True, cache=True)
def claimed_after(claimed: int, pieces: int, cores: int) -> int:
    """All claims once a work of so many pieces is done: each core has made one in vain."""
    return claimed + pieces + cores


class Team:
    """`cores` threads, the caller's own among them. The others sleep between calls."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self._counter: NDArray[np.int64] = np.zeros(2 * _LINE, np.int64)
        self._task: Callable[[int], None] | None = None
        self._busy = threading.Lock()
        # Locks that one thread takes and another gives back: a semaphore of the library is many times as slow.
        self._starts = [_taken() for _ in range(cores - 1)]
        self._ends = [_taken() for _ in range(cores - 1)]
        for core in range(1, cores):
            threading.Thread(target=self._member, args=(core,), name=f"team-{core}", daemon=True).start()

    def run(self, function: Any, *arguments: Any) -> None:
        """function(core, cores, counter, *arguments) on every core. It must be compiled, and must not raise."""
        with self._busy:
            self._counter[:] = 0
            self._task = lambda core: function(core, self.cores, self._counter, *arguments)
            for start in self._starts:
                start.release()
            self._task(0)
            for end in self._ends:
                end.acquire()

    def _member(self, core: int) -> None:
        while True:
            self._starts[core - 1].acquire()
            assert self._task is not None
            self._task(core)
            self._ends[core - 1].release()


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@functools.cache
def team(cores: int) -> Team:
    """The process's team of so many cores: threads are made once."""
    return Team(cores)
