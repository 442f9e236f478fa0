"""What workers are asked about weights, and how one that has another version is led to the one that is served."""

from __future__ import annotations

import itertools
from dataclasses import replace

from interfaces import GENERATE, WeightsCommand, WeightsReport, WeightsTask
from scheduler.workers import Worker
from shared.weights_file import Served


class WeightsFollowers:
    """The commands of one scheduler, which have numbers of their own."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        # What the workers were asked that are led, by index.
        self._led: dict[int, int] = {}

    @property
    def leading(self) -> bool:
        """Whether some worker is led to the version that is served."""
        return bool(self._led)

    def send(self, worker: Worker, task: int, place: int = 0, **facts: object) -> int:
        """Ask a worker. Returns the command's number.

        In a group the worker's rank follows from its `place`, and the first one keeps what is sent.
        """
        number = next(self._numbers)
        command = WeightsCommand(self._incarnation, worker.hello.epoch, number, task, **facts)  # type: ignore[arg-type]
        if command.group is not None:
            group = replace(command.group, rank=command.group.rank + place)
            command = replace(command, group=group, path="" if place else command.path)
        worker.weights.ask(command)
        return number

    def welcome(self, worker: Worker, served: Served) -> None:
        """Give a new worker the version and the memory that it may have."""
        if GENERATE not in worker.hello.tasks or worker.weights.number == served.version.number:
            self.in_use(worker, served)
        else:
            self.lead(worker, served)

    def lead(self, worker: Worker, served: Served) -> None:
        """Have a worker load the version that is served."""
        worker.weights.current = False
        self._led[worker.hello.index] = self.send(worker, WeightsTask.PREPARE, version=served.version)

    def in_use(self, worker: Worker, served: Served) -> None:
        """A worker computes with the version that is served."""
        worker.weights.current = True
        if served.absent:
            self.send(worker, WeightsTask.RELEASE, tags=served.absent)

    def lost(self, worker: Worker) -> None:
        """Wait for a worker no longer."""
        self._led.pop(worker.hello.index, None)

    def heard(self, worker: Worker, command: WeightsCommand, report: WeightsReport, served: Served) -> str:
        """Go on to lead a worker. Returns why it cannot be led; empty if it can, or was not led."""
        index = worker.hello.index
        if self._led.get(index) != report.number:
            return ""
        del self._led[index]
        if report.error:
            return f"cannot serve version {served.version.name!r} of the weights: {report.error}"
        if command.task == WeightsTask.USE:
            self.in_use(worker, served)
        elif command.version is not None and command.version.number == served.version.number:
            worker.change_weights(command.version.number)
            self._led[index] = self.send(worker, WeightsTask.USE, version=command.version)
        else:
            self.lead(worker, served)
        return ""
