"""A team of threads that runs one compiled function together, phase by phase, and takes the work of each in pieces.

Knows threads and atomics. A decode step has hundreds of phases; waking a sleeping thread for each would cost more than
the work in it, so whoever finds no piece left spins until the next phase. A member that waits for long sleeps after
all: then another process has taken a core, and the sleeper's own core may be what that process needs.

Nobody is waited for who has not come: a phase ends when its pieces are done, whoever did them. So the thread that began
a job may do something else first and help later, while the others go on. A job may have turns, each of some phases: who
began it helps until the end of the one it waits for, and may say that the one in progress is the last. Does not know
what the function does. Linux only.
"""

from __future__ import annotations

import functools
import platform
import threading
from queue import SimpleQueue
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
_WORD, _DONE, _OVER, _SLEEPERS, _TURNS = _LINE, 2 * _LINE, 3 * _LINE, 4 * _LINE, 5 * _LINE
"""Places in a counter: the phase, and how many of its pieces are taken from either end; pieces done; the phase alone,
for those who wait; how many of them sleep; how many turns have begun, and how many there are to be."""
# Some tens of microseconds: what one core's last piece takes longer than another's.
_SPINS = 40_000
_PHASE_BITS, _COUNT_BITS = 16, 24
_PHASE, _COUNT = (1 << _PHASE_BITS) - 1, (1 << _COUNT_BITS) - 1
OVER = _PHASE
"""The phase in which a job is over: all others are before it."""
_EVERY_TURN = 1 << 30
_MOST_GRAINS = 8
"""That a core takes at a time: another process may keep it from finishing them."""
# Of the system call: 98 in the table that Linux gives to all newer architectures.
_FUTEX_NUMBER = 202 if platform.machine() == "x86_64" else 98
_PRIVATE = 128
_WAIT, _WAKE = 0 | _PRIVATE, 1 | _PRIVATE
_EVERYONE = 1 << 30


def _place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Where counter[at] lies. (A slice would hold a reference, whose count all cores would write.)"""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


@intrinsic
def _add(typing: Any, counter: Any, at: Any, amount: Any) -> Any:
    """Add to counter[at], and return what it was; everything written before is seen by who reads the sum."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _place(context, builder, signature, args)
        # Stronger than "acq_rel": who falls asleep and who wakes sleepers each write one number and read the other's.
        return builder.atomic_rmw("add", data, args[2], "seq_cst")

    return types.int64(counter, types.int64, types.int64), codegen


@intrinsic
def _swap(typing: Any, counter: Any, at: Any, old: Any, new: Any) -> Any:
    """Put `new` in the place of counter[at] if that is `old`, and return whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _place(context, builder, signature, args)
        return builder.extract_value(builder.cmpxchg(data, args[2], args[3], "seq_cst", "seq_cst"), 1)

    return types.boolean(counter, types.int64, types.int64, types.int64), codegen


@intrinsic
def _store(typing: Any, counter: Any, at: Any, value: Any) -> Any:
    """Set counter[at]; everything written before is seen by who reads it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _place(context, builder, signature, args)
        builder.store_atomic(args[2], data, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(counter, types.int64, types.int64), codegen


@intrinsic
def _raise(typing: Any, counter: Any, at: Any, value: Any) -> Any:
    """Set counter[at], unless it is more already; everything written before is seen by who reads it."""

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
    """Linux's futex on the lower half of counter[at]: sleep while that is `value`, or wake so many sleepers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _place(context, builder, signature, args)
        long, pointer = ir.IntType(64), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(long, (long,) * 4 + (pointer, pointer, long))
        system_call = numba.core.cgutils.get_or_insert_function(builder.module, kind, "syscall")
        address, nothing = builder.ptrtoint(data, long), ir.Constant(pointer, None)
        number = ir.Constant(long, _FUTEX_NUMBER)
        builder.call(system_call, (number, address, args[2], args[3], nothing, nothing, ir.Constant(long, 0)))
        return context.get_dummy_value()

    return types.void(counter, types.int64, types.int64, types.int64), codegen


@njit(nogil=True, cache=True)
def phase_of(counter: Any) -> int:
    """The phase that the team is in."""
    phase: int = _load(counter, _WORD) & _PHASE
    return phase


@njit(nogil=True, cache=True)
def take(counter: Any, phase: int, pieces: int, grain: int, core: int, cores: int) -> tuple[int, int]:
    """Pieces of this phase that nobody has taken: the first, and how many; none if there are none left.

    Even cores go up from the first piece and odd ones down from the last, each through neighbours in memory. They take
    some grains at a time, fewer as less is left, and the last grain piece by piece, so that all end at about the same
    time.
    """
    while True:
        word = _load(counter, _WORD)
        low, high = (word >> _PHASE_BITS) & _COUNT, (word >> (_PHASE_BITS + _COUNT_BITS)) & _COUNT
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
def was_last(counter: Any, done: int, pieces: int) -> bool:
    """Says how many pieces of the phase this core has done; True for who has done the last of all.

    That one must `begin` the next phase; the others `wait`.
    """
    return bool(_add(counter, _DONE, done) + done == pieces)


@njit(nogil=True, cache=True)
def begin(counter: Any, phase: int) -> None:
    """Let the team go on to this phase."""
    _store(counter, _DONE, 0)
    _store(counter, _WORD, phase)
    # From here on others may end this phase, and all that follow: whoever loses its core here must not take that back,
    # or it waits for what has been.
    _raise(counter, _OVER, phase)
    if _load(counter, _SLEEPERS) > 0:
        _futex(counter, _OVER, _WAKE, _EVERYONE)


@njit(nogil=True, cache=True)
def another_turn(counter: Any) -> bool:
    """Whether there is one, for who has ended one; if so, it has begun."""
    while True:
        word = _load(counter, _TURNS)
        begun, count = word & _COUNT, word >> _COUNT_BITS
        if begun >= count:
            return False
        if _swap(counter, _TURNS, word, word + 1):
            return True


@njit(nogil=True, cache=True)
def last_turn(counter: Any) -> int:
    """Make the turn that has begun the last; returns how many there are with it."""
    while True:
        word = _load(counter, _TURNS)
        begun = word & _COUNT
        if _swap(counter, _TURNS, word, begun << _COUNT_BITS | begun):
            return begun  # type: ignore[no-any-return]


@njit(nogil=True, cache=True)
def wait(counter: Any, phase: int) -> None:
    """Until the team is past this phase."""
    spins = 0
    while _load(counter, _OVER) == phase and spins < _SPINS:
        spins += 1
    if spins == _SPINS:
        _add(counter, _SLEEPERS, 1)
        while _load(counter, _OVER) == phase:
            _futex(counter, _OVER, _WAIT, phase)
        _add(counter, _SLEEPERS, -1)


class Job:
    """A call of a compiled function by whoever of a team has time for it."""

    def __init__(self, function: Any, turns: int, arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._counter: NDArray[np.int64] = np.zeros(7 * _LINE, np.int64)
        self._counter[_TURNS] = turns << _COUNT_BITS | 1

    def take_part(self, core: int, turns: int = _EVERY_TURN) -> None:
        """Returns when so many turns are over, or all. No core may take part twice at a time."""
        self._function(core, turns, self._counter, *self._arguments)

    def finish(self, turns: int = _EVERY_TURN) -> None:
        """Helps until so many turns are over, or all; for the thread that began it. Jobs before this must be done."""
        self.take_part(0, turns)

    def stop(self) -> int:
        """Lets the turn in progress be the last; returns how many there will have been, one at least."""
        return last_turn(self._counter)


class Team:
    """`cores` threads, the caller's own among them. The others sleep between jobs, and run them in order."""

    def __init__(self, cores: int) -> None:
        self._jobs: list[SimpleQueue[Job]] = [SimpleQueue() for _ in range(cores - 1)]
        for core, jobs in enumerate(self._jobs, start=1):
            threading.Thread(target=_work, args=(core, jobs), name=f"team-{core}", daemon=True).start()

    def begin(self, function: Any, *arguments: Any, turns: int = 1) -> Job:
        """function(core, turns, counter, *arguments) on every core. It must be compiled, and must not raise.

        It returns when so many of the job's turns are over, or the job is. The caller must `finish` jobs in the order
        of their begin.
        """
        job = Job(function, turns, arguments)
        for jobs in self._jobs:
            jobs.put(job)
        return job

    def run(self, function: Any, *arguments: Any) -> None:
        """The same, and wait for it."""
        self.begin(function, *arguments).finish()


def _work(core: int, jobs: SimpleQueue[Job]) -> None:
    while True:
        jobs.get().take_part(core)


@functools.cache
def team(cores: int) -> Team:
    """The process's team of so many cores: threads are made once."""
    return Team(cores)
