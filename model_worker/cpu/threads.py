"""A thread pool that runs one compiled function together, phase by phase, and claims the work of each in pieces.

Knows threads and atomics. A decode step has hundreds of phases; waking a sleeping thread for each would cost more than
the work in it, so a thread that finds no piece left spins until the next phase. A thread that waits for long sleeps
after all: then another process has taken a core, and the sleeper's own core may be what that process needs.

No phase waits for a certain thread: it ends when its pieces are done, by any core. So the thread that began a job may
do something else first and help later, while the others go on. Does not know the function's purpose.
Linux only.
"""

from __future__ import annotations

import functools
import platform
import threading
from collections import deque
from queue import SimpleQueue
from typing import Any, ClassVar

import numba.extending
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numpy.typing import NDArray

from shared.niceness import go_behind

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

# Numbers in a line of memory: counts of different cores must not share one.
_LINE = 8
# Places in a counter: the phase, and how many of its pieces are taken from either end; pieces done; the phase alone,
# for waiting threads; how many of them sleep.
_WORD = _LINE
_DONE = 2 * _LINE
_OVER = 3 * _LINE
_SLEEPERS = 4 * _LINE
# Some tens of microseconds: what one core's last piece takes longer than another's.
_SPINS = 40_000
_PHASE_BITS = 16
_COUNT_BITS = 24
_PHASE = (1 << _PHASE_BITS) - 1
_COUNT = (1 << _COUNT_BITS) - 1
# The phase in which a job is over: all others are before it.
OVER = _PHASE
# Most grains that a core takes at a time: another process may keep it from finishing them.
_MOST_GRAINS = 8
# Of the system call: 98 in the table that Linux gives to all newer architectures.
_FUTEX_NUMBER = 202 if platform.machine() == "x86_64" else 98
_PRIVATE = 128
_WAIT = 0 | _PRIVATE
_WAKE = 1 | _PRIVATE
_EVERYONE = 1 << 30
# More threads than any pool has.
ALL_THREADS = 1 << 30


def _place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the address of counter[at]. (A slice would hold a reference, whose count all cores would write.)"""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


@intrinsic
def _add(typing: Any, counter: Any, at: Any, amount: Any) -> Any:
    """Add to counter[at], and return its old value. A thread that reads the sum sees all earlier writes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _place(context, builder, signature, args)
        # Stronger than "acq_rel": a thread that falls asleep and one that wakes sleepers each write one number and read
        # the other's.
        return builder.atomic_rmw("add", data, args[2], "seq_cst")

    return types.int64(counter, types.int64, types.int64), codegen


@intrinsic
def _swap(typing: Any, counter: Any, at: Any, old: Any, new: Any) -> Any:
    """Compare and swap: replace counter[at] by `new` if it is `old`, and return whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _place(context, builder, signature, args)
        return builder.extract_value(builder.cmpxchg(data, args[2], args[3], "seq_cst", "seq_cst"), 1)

    return types.boolean(counter, types.int64, types.int64, types.int64), codegen


@intrinsic
def _store(typing: Any, counter: Any, at: Any, value: Any) -> Any:
    """Set counter[at]. A thread that reads it sees all earlier writes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _place(context, builder, signature, args)
        builder.store_atomic(args[2], data, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(counter, types.int64, types.int64), codegen


@intrinsic
def _raise(typing: Any, counter: Any, at: Any, value: Any) -> Any:
    """Set counter[at], unless it is more already. A thread that reads it sees all earlier writes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.atomic_rmw("max", _place(context, builder, signature, args), args[2], "seq_cst")
        return context.get_dummy_value()

    return types.void(counter, types.int64, types.int64), codegen


@intrinsic
def _load(typing: Any, counter: Any, at: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _place(context, builder, signature, args)
        return builder.load_atomic(data, "seq_cst", 8)

    return types.int64(counter, types.int64), codegen


@intrinsic
def _futex(typing: Any, counter: Any, at: Any, operation: Any, value: Any) -> Any:
    """Call Linux's futex on the lower half of counter[at]: sleep while that is `value`, or wake so many sleepers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _place(context, builder, signature, args)
        long = ir.IntType(64)
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(long, (long,) * 4 + (pointer, pointer, long))
        system_call = numba.core.cgutils.get_or_insert_function(builder.module, kind, "syscall")
        address = builder.ptrtoint(data, long)
        nothing = ir.Constant(pointer, None)
        number = ir.Constant(long, _FUTEX_NUMBER)
        builder.call(system_call, (number, address, args[2], args[3], nothing, nothing, ir.Constant(long, 0)))
        return context.get_dummy_value()

    return types.void(counter, types.int64, types.int64, types.int64), codegen


@njit(nogil=True, cache=True)
def phase_of(counter: Any) -> int:
    """Return the phase that the pool is in."""
    phase: int = _load(counter, _WORD) & _PHASE
    return phase


@njit(nogil=True, cache=True)
def take(counter: Any, phase: int, pieces: int, grain: int, core: int, cores: int) -> tuple[int, int]:
    """Claim pieces of this phase: the first, and their number; 0 if there are none left.

    Even cores go up from the first piece and odd ones down from the last, each through neighbours in memory. They take
    some grains at a time, fewer as less is left, and the last grain piece by piece, so that all end at about the same
    time.
    """
    while True:
        word = _load(counter, _WORD)
        low = (word >> _PHASE_BITS) & _COUNT
        high = (word >> (_PHASE_BITS + _COUNT_BITS)) & _COUNT
        left = pieces - low - high
        if left <= 0 or word & _PHASE != phase:
            return 0, 0
        if left > grain:
            count = grain * max(1, min(_MOST_GRAINS, left // (2 * cores * grain)))
        else:
            others = low if core % 2 else high
            count = left if others == 0 else 1
        if core % 2:
            if _swap(counter, _WORD, word, word + (count << (_PHASE_BITS + _COUNT_BITS))):
                return pieces - high - count, count
        elif _swap(counter, _WORD, word, word + (count << _PHASE_BITS)):
            return low, count


@njit(nogil=True, cache=True)
def arrived_last(counter: Any, done: int, pieces: int) -> bool:
    """Report `done` pieces of the phase at its barrier. True for the core that has done the last of all.

    That core must `begin` the next phase; the others `wait`.
    """
    return bool(_add(counter, _DONE, done) + done == pieces)


@njit(nogil=True, cache=True)
def begin(counter: Any, phase: int) -> None:
    """Let the pool go on to this phase."""
    _store(counter, _DONE, 0)
    _store(counter, _WORD, phase)
    # From here on others may end this phase, and all that follow: a thread that loses its core here must not take that
    # back, or it waits for what has been.
    _raise(counter, _OVER, phase)
    if _load(counter, _SLEEPERS) > 0:
        _futex(counter, _OVER, _WAKE, _EVERYONE)


@njit(nogil=True, cache=True)
def wait(counter: Any, phase: int) -> None:
    """Wait until the pool is past this phase."""
    spins = 0
    while _load(counter, _OVER) == phase and spins < _SPINS:
        spins += 1
    if spins == _SPINS:
        _add(counter, _SLEEPERS, 1)
        while _load(counter, _OVER) == phase:
            _futex(counter, _OVER, _WAIT, phase)
        _add(counter, _SLEEPERS, -1)


class Job:
    """A call of a compiled function by the threads of a pool."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], unfinished: deque[Job]) -> None:
        """`unfinished` has the job until it is finished."""
        self._function = function
        self._arguments = arguments
        self._unfinished = unfinished
        unfinished.append(self)
        self._counter: NDArray[np.int64] = np.zeros(6 * _LINE, np.int64)

    def take_part(self, core: int) -> None:
        """Take part until the job is over. No core may take part twice at a time."""
        self._function(core, self._counter, *self._arguments)

    def finish(self) -> None:
        """Help until the job is over; for the thread that began it. Jobs before this must be done."""
        self.take_part(0)
        if self in self._unfinished:
            self._unfinished.remove(self)


class ThreadPool:
    """`cores` threads, the caller's own among them. The others sleep between jobs, and run them in order."""

    # Threads of a pool, its caller among them, that take part in jobs which begin from now on. Any thread may set it,
    # to keep cores for itself. Jobs give the same results.
    most_threads: ClassVar[int] = ALL_THREADS

    def __init__(self, cores: int, niceness: int | None = None) -> None:
        """A pool whose threads have a `niceness` works beside those of steps, and `most_threads` is none of its."""
        self.cores = cores
        self._keeps_threads = niceness is not None
        self._jobs: list[SimpleQueue[Job]] = [SimpleQueue() for _ in range(cores - 1)]
        self._unfinished: deque[Job] = deque()
        # Threads beside the caller that have the unfinished jobs.
        self._helpers = cores - 1
        for core, jobs in enumerate(self._jobs, start=1):
            arguments = core, jobs, niceness or 0
            threading.Thread(target=_work, args=arguments, name=f"team-{core}", daemon=True).start()

    def begin(self, function: Any, *arguments: Any) -> Job:
        """Start function(core, counter, *arguments) on every core. It must be compiled, and must not raise.

        It returns when the job is over. The caller must `finish` jobs in the order in which it began them.
        """
        most = ALL_THREADS if self._keeps_threads else self.most_threads
        helpers = min(len(self._jobs), most - 1)
        for jobs in self._jobs[self._helpers : helpers]:
            # A thread that did not begin the new job behind these would begin it before they are over.
            for earlier in self._unfinished:
                jobs.put(earlier)
        self._helpers = helpers
        job = Job(function, arguments, self._unfinished)
        for jobs in self._jobs[:helpers]:
            jobs.put(job)
        return job

    def run(self, function: Any, *arguments: Any) -> None:
        """Run a function on every core, and wait for it."""
        self.begin(function, *arguments).finish()


def _work(core: int, jobs: SimpleQueue[Job], niceness: int) -> None:
    if niceness:
        go_behind(niceness)
    while True:
        jobs.get().take_part(core)


@functools.cache
def thread_pool(cores: int) -> ThreadPool:
    """Return the process's thread pool of so many cores: threads are made once."""
    return ThreadPool(cores)


@functools.cache
def pool_beside(cores: int, niceness: int) -> ThreadPool:
    """Return the process's thread pool of so many cores for work beside steps, for one caller at a time."""
    return ThreadPool(cores, niceness)
