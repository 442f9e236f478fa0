"""The worker's loop: receive a step, a batch of texts or a pass over images, run it, send its result.

Once a second it sends a heartbeat. On another machine than its scheduler's it goes on after a broken connection, under
a new epoch (`scheduler_link.py`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Protocol

import numpy as np
import zmq

from interfaces import (
    UNREGISTERED,
    Batch,
    BatchResult,
    Dismissal,
    DropAdapter,
    LoadAdapter,
    Ping,
    PixelResult,
    PixelStep,
    Ready,
    Refusal,
    Retire,
    ShipKv,
    Step,
    StepResult,
    TakeKv,
    VersionError,
    WeightsCommand,
    Welcome,
    WireError,
    WorkerGoodbye,
    WorkerHello,
    WorkerLeaves,
    decode,
    encode,
)
from model_worker.beside import NOTHING_BESIDE, Beside
from model_worker.execution.base import Counters
from model_worker.scheduler_link import Refused, SchedulerLink
from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.vision.encode_queue import ReadyRow
from model_worker.weights.commands import WeightsCommands
from shared import phases
from shared.endpoints import remote_identity, worker_identity
from shared.setting_forms import STEP_TOKENS
from shared.sockets import connect_dealer, same_host

log = logging.getLogger(__name__)

HELLO_SECONDS = 1.0
# An engine that has not been idle for this long does its idle work all the same, or a later request waits for it.
RESTLESS_SECONDS = 10.0
# Time in which the goodbye may leave.
LAST_WORDS_MS = 1000
# Time for which the next step is awaited before the launched one is.
PATIENCE_MS = 2
# Time in which the sequences of a worker that leaves are fetched: it ends before its supervisor kills it. A scheduler
# that says nothing for a part of it fetches none.
LEAVE_SECONDS = 8.0
LEAVE_SILENCE_SECONDS = 2.0


class Launched(Protocol):
    """A step, batch or pass that was launched."""

    @property
    def done(self) -> bool: ...

    def result(self) -> StepResult | BatchResult | PixelResult: ...


class Runner(Protocol):
    """Runs the messages of its classes: the engine steps, the runner of texts batches, that of images passes."""

    @property
    def takes(self) -> type[Step] | type[Batch] | type[PixelStep] | UnionType: ...

    @property
    def counters(self) -> Counters: ...

    def begin(self, message: Any) -> Launched | None:
        """Launch a message. None where its result comes from what computes beside the steps."""
        ...

    def rest(self) -> None:
        """Do work that takes seconds. Called when there is nothing to compute."""
        ...

    def beat(self) -> None:
        """Do what is due by time. Called about once a second."""
        ...

    def forget(self) -> None:
        """Forget all rows: what comes next is for another registration. No step is in flight."""
        ...


class Loop:
    """Owns the socket. `run` returns after `stop`, or when `superseded` says that a better worker should follow.

    An exception of the engine ends it, and so the process: state on a device that failed is not to be trusted, and the
    scheduler replays the sequences on the next epoch.
    """

    def __init__(
        self,
        engine: Runner,
        hello: WorkerHello,
        endpoint: str,
        keys: Path | None = None,
        superseded: Callable[[], bool] = lambda: False,
        beside: Beside = NOTHING_BESIDE,
        index_file: Path | None = None,
        trouble: Callable[[], GroupLost | None] | None = None,
    ) -> None:
        """The index that a scheduler on another machine gives is kept in `index_file`. `trouble` says at the end why
        the engine could not go on; None if it could.
        """
        self._engine = engine
        self._superseded = superseded
        self._encoding = beside.encoding
        self._adapters = beside.adapters
        self._weights = beside.weights
        self._moves = beside.moves
        self._shipper = beside.shipper
        self._hello = hello
        self._context: zmq.Context[Any] = zmq.Context()
        self._same_host = same_host(endpoint)
        self._trouble = trouble
        self._link = None if self._same_host else SchedulerLink(endpoint, index_file)
        if self._link is None:
            identity = worker_identity(hello.index, hello.epoch, os.getpid())
        else:
            identity = remote_identity(self._link.name)
            self._hello = self._link.unregistered(hello)
        self._socket = connect_dealer(self._context, endpoint, identity, keys)
        self._poller = zmq.Poller()
        if self._link is not None:
            self._poller.register(self._link.watch(self._socket), zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        if self._encoding is not None:
            self._poller.register(self._encoding.fileno(), zmq.POLLIN)
        self._reporting = beside.reporting
        for each in self._reporting:
            self._poller.register(each.fileno(), zmq.POLLIN)
        self._next_hello = 0.0
        self._pending: deque[Launched] = deque()
        self._stopping = False
        # It is asked to end. The scheduler was told so; it was heard then, and must be done by that time.
        self._leaving = False
        self._heard = 0.0
        self._leaves_by = 0.0
        # The scheduler that has sent the last step.
        self._incarnation: int | None = None

    def stop(self) -> None:
        """End `run` after the step in progress. Safe to call from a signal handler."""
        self._stopping = True

    def leave(self) -> None:
        """End `run` when the sequences that are here have gone to others; at once if it is called again.

        Safe to call from a signal handler.
        """
        if self._leaving or self._shipper is None:
            self._stopping = True
        self._leaving = True

    @property
    def leaves(self) -> bool:
        """Whether it was asked to end by `leave`."""
        return self._leaving

    @property
    def _epoch(self) -> int:
        return self._hello.epoch

    def run(self) -> None:
        # Idle work does not come first: a request may have waited for this worker's first answer.
        began = time.monotonic()
        rested = False
        try:
            while not self._stopping and not self._superseded():
                now = time.monotonic()
                if self._leaving and not self._may_stay(now):
                    break
                if now >= self._next_hello:
                    phases.beat()
                    self._engine.beat()
                    # During a long step the connection may have broken: another scheduler does not know the old epoch.
                    if self._link is not None and self._link.is_broken(dict(self._poller.poll(0))):
                        self._begin_anew(self._link)
                    self._send(encode(self._counted()))
                    if self._leaves_by:
                        # The scheduler may be another one, or may not have known this worker before.
                        self._send(encode(WorkerLeaves(self._hello.index, self._epoch)))
                    self._next_hello = now + HELLO_SECONDS
                    idle = not self._pending and now >= began + HELLO_SECONDS
                    if not rested and (idle or now >= began + RESTLESS_SECONDS):
                        rested = True
                        self._engine.rest()
                # A launched step is waited for when the next one has been launched too, or when none comes soon: it is
                # the scheduler's answer to the last result.
                step = self._receive(PATIENCE_MS if self._pending else max(0, int((self._next_hello - now) * 1000) + 1))
                if step is not None:
                    self._incarnation = step.incarnation
                    if self._encoding is not None:
                        self._encoding.step_began()
                    launched = self._engine.begin(step)
                    if launched is not None:
                        self._pending.append(launched)
                self._answer(leave=0 if step is None else 1)
            self._answer(leave=0)
            self._send_goodbye(None if self._trouble is None else self._trouble())
        except GroupLost as error:
            self._send_goodbye(error)
            raise
        finally:
            # The goodbye may leave; after an exception nothing waits to be sent.
            self._context.destroy(linger=LAST_WORDS_MS)

    def _may_stay(self, now: float) -> bool:
        """Whether a worker that leaves may still be needed. Says that it leaves, first of all."""
        if not self._leaves_by:
            if self._epoch == UNREGISTERED:
                return False
            self._heard = now
            self._leaves_by = now + LEAVE_SECONDS
            self._send(encode(WorkerLeaves(self._hello.index, self._epoch)))
        return now < self._leaves_by and now - self._heard < LEAVE_SILENCE_SECONDS

    def _send_goodbye(self, lost: GroupLost | None) -> None:
        why = ("",) if lost is None else (str(lost), lost.blamed)
        self._send(encode(WorkerGoodbye(self._hello.index, self._epoch, *why)))

    def _counted(self) -> WorkerHello:
        """The hello with what was counted until now."""
        counters = self._engine.counters
        step_tokens = self._hello.step_tokens
        if counters.step_tokens is not None:
            step_tokens = min(counters.step_tokens, step_tokens or STEP_TOKENS)
        hello = replace(
            self._hello,
            step_tokens=step_tokens,
            drafted=counters.drafted,
            accepted=counters.accepted,
            drafts=counters.drafts,
            accepted_at=list(counters.accepted_at),
        )
        if self._encoding is None:
            return hello
        encoding = self._encoding
        return replace(
            hello, encoded=encoding.encoded, encode_ms=int(encoding.seconds * 1000), image_hits=encoding.hits
        )

    def _answer(self, leave: int) -> None:
        """Send the results of launched steps, oldest first: those that are there, and all but the last `leave`."""
        while self._pending and (len(self._pending) > leave or self._pending[0].done):
            self._send_ours(self._pending.popleft().result())
            # Nothing could be heard meanwhile.
            self._heard = time.monotonic()
        self._note_end()

    def _note_end(self) -> None:
        if self._encoding is not None and not self._pending:
            self._encoding.steps_ended()

    def _receive(self, timeout_ms: int) -> Step | Batch | PixelStep | None:
        if not self._readable(timeout_ms):
            return None
        try:
            message = decode(self._socket.recv(), ipc_peer=self._same_host)
        except WireError as error:
            if self._link is not None and isinstance(error, VersionError):
                raise Refused(f"the scheduler at {self._link.endpoint} cannot be understood: {error}") from None
            log.warning("dropped a message: %s", error)
            return None
        self._heard = time.monotonic()
        if self._link is not None and self._is_for_link(message, self._link):
            return None
        if isinstance(message, Retire) and message.epoch == self._epoch:
            raise SystemExit(f"the scheduler has given this worker up: {message.reason}")
        if (
            isinstance(message, LoadAdapter | DropAdapter)
            and message.epoch == self._epoch
            and self._adapters is not None
        ):
            # Launched steps may use what is freed now.
            self._answer(leave=0)
            self._adapters.obey(message)
            return None
        if isinstance(message, ShipKv | TakeKv) and message.epoch == self._epoch and self._shipper is not None:
            if self._shipper.still:
                # Launched steps may write to the same blocks.
                self._answer(leave=0)
            self._shipper.obey(message)
            return None
        if isinstance(message, Dismissal) and message.epoch == self._epoch:
            self._stopping = True
            return None
        if isinstance(message, WeightsCommand) and message.epoch == self._epoch and self._weights is not None:
            self._change_weights(message, self._weights)
            return None
        if not isinstance(message, self._engine.takes) or message.epoch != self._epoch:
            log.warning("dropped a %s that is not for epoch %d", type(message).__name__, self._epoch)
            return None
        return message

    def _is_for_link(self, message: object, link: SchedulerLink) -> bool:
        """Take a message about the registration with a scheduler on another machine. Returns whether it was one."""
        if isinstance(message, Refusal) and message.name == link.name:
            if message.waits:
                link.refused_for_now(message.reason)
                return True
            raise Refused(f"the scheduler at {link.endpoint} refuses this worker: {message.reason}")
        if isinstance(message, Retire) and message.stays and message.epoch == self._epoch:
            self._begin_anew(link)
            return True
        if isinstance(message, Welcome) and message.name == link.name:
            if self._epoch != message.epoch:
                self._hello = link.registered(self._hello, message)
                self._next_hello = 0.0
            return True
        return isinstance(message, Ping)

    def _begin_anew(self, link: SchedulerLink) -> None:
        """Forget all rows and adapters, and ask for a new epoch: messages may have been lost."""
        while self._pending:
            self._pending.popleft().result()
        self._note_end()
        self._engine.forget()
        if self._adapters is not None:
            self._adapters.forget()
        if self._shipper is not None:
            self._shipper.forget()
        # What it had is computed elsewhere by now.
        self._stopping |= self._leaving
        self._hello = link.unregistered(self._hello)
        self._next_hello = 0.0

    def _change_weights(self, command: WeightsCommand, weights: WeightsCommands) -> None:
        # Launched steps use what changes now.
        self._answer(leave=0)
        for mover in (self._moves, self._shipper):
            if mover is not None:
                mover.finish()
        report = weights.obey(command)
        self._hello = weights.described(self._hello)
        if self._adapters is not None:
            # Before the report: after it a step may come that uses one of them.
            self._send_all(self._adapters.take())
        if report is not None:
            self._send_ours(report)

    def _send_all(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self._send_ours(message)

    def _send_ours(self, message: Any) -> None:
        """Send a message under the index and epoch that this worker has now."""
        if self._link is not None:
            message = replace(message, index=self._hello.index, epoch=self._epoch)
        self._send(encode(message))

    def _readable(self, timeout_ms: int) -> bool:
        """Wait for a message. Reports images that are encoded and adapters that are read, and then waits no longer."""
        events = dict(self._poller.poll(timeout_ms))
        if self._link is not None:
            if self._link.is_broken(events):
                self._begin_anew(self._link)
            self._link.note(heard=self._socket in events)
        if self._encoding is not None and self._encoding.fileno() in events:
            self._send_ready(self._encoding.take())
        for each in self._reporting:
            if each.fileno() in events:
                self._send_all(each.take())
        return self._socket in events

    def _send_ready(self, ready: list[ReadyRow]) -> None:
        if not ready or self._incarnation is None:
            return
        self._send(
            encode(
                Ready(
                    incarnation=self._incarnation,
                    epoch=self._epoch,
                    index=self._hello.index,
                    rows=np.array([row.row for row in ready], np.int32),
                    joined=np.array([row.joined for row in ready], np.int64),
                    upto=np.array([row.upto for row in ready], np.int32),
                    errors={row.row: row.error for row in ready if row.error is not None},
                    seconds=np.array([row.seconds for row in ready], np.float32),
                )
            )
        )

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            log.warning("the scheduler has taken no message for a long time; one is lost")
