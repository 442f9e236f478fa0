"""Carries out what the scheduler asks about weights, and reports it.

Knows messages, and whose they are. What they mean is serving.py's and groups.py's to know.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from interfaces import WeightsCommand, WeightsReport, WeightsTask, WorkerHello
from model_worker.weights.groups import Groups
from model_worker.weights.serving import ServedModel, WeightsRefused

log = logging.getLogger(__name__)

_OF_GROUPS = (WeightsTask.JOIN, WeightsTask.LEAVE, WeightsTask.RECEIVE)


class WeightsCommands:
    """The commands to one worker about its weights."""

    def __init__(self, served: ServedModel, groups: Groups, hello: WorkerHello) -> None:
        self._served = served
        self._groups = groups
        self._whose = hello.epoch, hello.index
        self._incarnation: int | None = None

    def fileno(self) -> int:
        """Becomes readable when `take` has something."""
        return self._groups.fileno()

    def described(self, hello: WorkerHello) -> WorkerHello:
        """Return the hello with what may have changed with the weights."""
        runner = self._served.runner
        return replace(
            hello,
            weights=self._served.version.number,
            backend=runner.description,
            row_invariant=runner.backend.row_invariant,
        )

    def obey(self, command: WeightsCommand) -> WeightsReport | None:
        """Carry out a command, no step being in flight. None: its report comes from `take`, or there is none."""
        if command.incarnation != self._incarnation:
            self._incarnation = command.incarnation
            self._served.abandon()
        if command.task in _OF_GROUPS:
            self._groups.obey(command)
            return None
        if command.task == WeightsTask.ABANDON:
            self._served.abandon()
            return None
        report = WeightsReport(command.incarnation, *self._whose, command.number)
        try:
            return self._carried_out(command, report)
        except WeightsRefused as refusal:
            return replace(report, error=str(refusal))
        except Exception as caught:
            if command.task != WeightsTask.PREPARE:
                raise
            # Files may be wrong in ways that no reader foresees, and the old version is whole.
            log.exception("version %s of the weights cannot be prepared by an error of ours", command.version)
            return replace(report, error=f"the model worker's log has the reason ({type(caught).__name__})")

    def take(self) -> list[WeightsReport]:
        """The reports of commands that were carried out beside steps since the last call."""
        reports = []
        for command, error in self._groups.take():
            if command.incarnation == self._incarnation:
                reports.append(WeightsReport(command.incarnation, *self._whose, command.number, error))
            elif command.path:
                # The scheduler that is there now knows nothing of it.
                Path(command.path).unlink(missing_ok=True)
        return reports

    def _carried_out(self, command: WeightsCommand, report: WeightsReport) -> WeightsReport:
        served = self._served
        match command.task:
            case WeightsTask.PREPARE:
                assert command.version is not None
                return replace(report, stamp=served.prepare(command.version))
            case WeightsTask.USE:
                assert command.version is not None
                served.use_prepared(command.version.number)
            case WeightsTask.RELEASE:
                served.release(command.tags)
            case WeightsTask.RESUME:
                served.resume(command.tags)
            case WeightsTask.READ:
                return self._read(command, report)
            case _:
                raise WeightsRefused(f"there is no task {command.task}")
        return report

    def _read(self, command: WeightsCommand, report: WeightsReport) -> WeightsReport:
        values = self._served.read(command.name, command.most)
        flat = np.ascontiguousarray(values.numpy().reshape(-1), np.float32)
        return replace(report, values=flat, shape=list(values.shape))
