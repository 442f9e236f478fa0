"""What workers say to the scheduler.

Knows messages, and whose they may be. Does not know sockets: it answers through `send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interfaces import (
    AdapterFailed,
    AdapterLoaded,
    BatchResult,
    KvMoved,
    KvPiece,
    KvTaken,
    PixelResult,
    Ready,
    Retire,
    StepResult,
    WeightsReport,
    WireError,
    WorkerGoodbye,
    WorkerHello,
    WorkerLeaves,
)
from scheduler.core import Scheduler
from scheduler.health import Health
from scheduler.registration import Registration

# What a worker says under its index.
OfWorker = (
    StepResult
    | BatchResult
    | PixelResult
    | Ready
    | KvMoved
    | KvPiece
    | KvTaken
    | AdapterLoaded
    | AdapterFailed
    | WeightsReport
    | WorkerLeaves
    | WorkerGoodbye
)


class WorkerMessages:
    """Passes each message to the part of the scheduler that it is for, and notes that its worker was heard."""

    def __init__(
        self, scheduler: Scheduler, health: Health, registration: Registration, send: Callable[[bytes, Any], bool]
    ) -> None:
        self._scheduler = scheduler
        self._health = health
        self._registration = registration
        self._send = send

    def handle(self, identity: bytes, message: object) -> None:
        """Carry out a message. WireError for one that a worker may not send."""
        if isinstance(message, OfWorker) and not self._registration.speaks_for(identity, message.index):
            # It was given up and another one has its index, or it never had this one.
            return
        match message:
            case StepResult():
                # As in `_hear`, without a call: these are most of the messages.
                known = self._scheduler.workers.get(message.index)
                if known is not None and known.hello.epoch == message.epoch:
                    self._health.worker_heard(message.index)
                    self._scheduler.step_result(message)
            case BatchResult() | PixelResult():
                if self._hear(message):
                    self._scheduler.batch_result(message)
            case Ready():
                if self._hear(message):
                    self._scheduler.images_ready(message)
            case KvMoved():
                self._scheduler.kv_moved(message)
            case KvPiece() | KvTaken():
                self._health.worker_heard(message.index)
                self._scheduler.kv_shipped(message)
            case WorkerLeaves():
                self._scheduler.worker_leaves(message)
            case AdapterLoaded():
                if self._hear(message):
                    self._scheduler.adapters.loaded(message)
                    self._health.check_soon()
            case AdapterFailed():
                if self._hear(message):
                    self._scheduler.adapters.failed(message)
                    self._health.check_soon()
            case WeightsReport():
                if self._hear(message):
                    self._hear_of_weights(identity, message)
            case WorkerHello():
                self._registration.hear(identity, message)
            case WorkerGoodbye():
                story = f"cannot go on: {message.reason}" if message.reason else "said goodbye"
                blamed = bool(message.reason) and message.blamed
                self._health.lose_worker(message.index, message.epoch, story, blamed)
            case _:
                raise WireError(f"a worker may not send {type(message).__name__}")

    def _hear(self, message: BatchResult | PixelResult | Ready | AdapterLoaded | AdapterFailed | WeightsReport) -> bool:
        """Note that the worker of a message was heard. False if that one was given up."""
        known = self._scheduler.workers.get(message.index)
        if known is None or known.hello.epoch != message.epoch:
            return False
        self._health.worker_heard(message.index)
        return True

    def _hear_of_weights(self, identity: bytes, report: WeightsReport) -> None:
        problem = self._scheduler.weights.heard(report)
        if problem:
            self._health.lose_worker(report.index, report.epoch, problem, blamed=False)
            self._send(identity, Retire(report.epoch, problem))
        self._health.check_soon()
