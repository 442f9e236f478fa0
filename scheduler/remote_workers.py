"""Workers of other machines: which index and epoch each gets, which are refused, and which were cut off.

A worker of another machine comes with a name of its own and asks for an index and an epoch; no clock and no operator
has to keep them apart. When its connection breaks it asks again, and goes on under a new epoch with the weights that it
has. Knows hellos, never sockets.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from interfaces import EPOCHS_OF_A_SUPERVISOR, Welcome, WorkerHello
from scheduler.workers import Worker

# Seconds for which an index is kept for a worker that has not registered under it.
KEPT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Place:
    index: int
    epoch: int
    given: float


class RemoteWorkers:
    """The indices and epochs that this scheduler has given. Indices below `first_index` are those of local workers."""

    def __init__(self, first_index: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_index = first_index
        self._clock = clock
        # Not those of another scheduler, nor those of a supervisor.
        self._next_epoch = (1 + secrets.randbelow(2**31)) * EPOCHS_OF_A_SUPERVISOR
        self._places: dict[str, _Place] = {}
        self._cut_off: set[tuple[int, int]] = set()

    def place_of(self, name: str) -> tuple[int, int] | None:
        """Index and epoch that a worker was given last."""
        place = self._places.get(name)
        return None if place is None else (place.index, place.epoch)

    def welcome(self, hello: WorkerHello, workers: Mapping[int, Worker]) -> Welcome | None:
        """Give a worker its index and epoch; None while another remote one has the index that it wants.

        Indices of local workers are never given, for these may be restarting: another one is given in their place. A
        worker that asks again before it has registered is given the same.
        """
        now = self._clock()
        self._forget_unused(workers, now)
        known = self._places.get(hello.name)
        if known is None:
            index = self._free_index(hello.index, workers)
            if index is None:
                return None
            known = self._places[hello.name] = _Place(index, self._next_epoch, now)
            self._next_epoch += 1
        return Welcome(hello.name, known.index, known.epoch)

    def cut_off(self, index: int, epoch: int) -> None:
        """Note that a worker was given up because it could not be reached: it may go on under a new epoch."""
        self._cut_off.add((index, epoch))
        self._places = {name: place for name, place in self._places.items() if place.epoch != epoch}

    def was_cut_off(self, hello: WorkerHello) -> bool:
        return (hello.index, hello.epoch) in self._cut_off

    def _free_index(self, wanted: int, workers: Mapping[int, Worker]) -> int | None:
        taken = {*workers, *(place.index for place in self._places.values())}
        if wanted >= self._first_index:
            return None if wanted in taken else wanted
        return next(index for index in range(self._first_index, 2**31) if index not in taken)

    def _forget_unused(self, workers: Mapping[int, Worker], now: float) -> None:
        """Forget what was given to workers that are gone, or that have never registered."""
        self._places = {
            name: place
            for name, place in self._places.items()
            if now - place.given < KEPT_SECONDS or _is_here(place, workers)
        }


def problem(hello: WorkerHello, workers: Mapping[int, Worker]) -> str:
    """Why a worker cannot compute beside those that are here, with both values; empty if it can."""
    if not workers:
        return ""
    index = compared(workers)
    first = workers[index].hello
    ours = _facts(first)
    for name, value in _facts(hello).items():
        if value != ours.get(name, value):
            remedy = "start it with the model and the settings of the others"
            return f"{name} is {value!r} here and {ours[name]!r} in worker {index}: {remedy}"
    return ""


def compared(workers: Mapping[int, Worker]) -> int:
    """The worker with which those that come are compared: one of the server's own machine, if one is here."""
    return min(workers, key=lambda index: (workers[index].remote, index))


def _facts(hello: WorkerHello) -> dict[str, str]:
    return {
        "architecture": hello.architecture,
        "dtype": hello.dtype,
        "vocabulary": str(hello.vocab_size),
        "tasks": ", ".join(hello.tasks),
        **hello.facts,
    }


def _is_here(place: _Place, workers: Mapping[int, Worker]) -> bool:
    worker = workers.get(place.index)
    return worker is not None and worker.hello.epoch == place.epoch
