"""The worker's loop: take a step or a batch of texts, run it, answer it.

While there is none, say once a second that this worker is here.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import zmq

from interfaces import (
    Batch,
    BatchResult,
    Retire,
    Step,
    StepResult,
    WireError,
    WorkerGoodbye,
    WorkerHello,
    decode,
    encode,
)
from model_worker.cpu.kernel_cache import Compilation
from model_worker.execution.base import Counters
from shared import phases
from shared.endpoints import worker_identity
from shared.sockets import connect_dealer, same_host

log = logging.getLogger(__name__)

HELLO_SECONDS = 1.0
# After this time without a rest, the engine's work at rest is done all the same: later a request would wait for it.
RESTLESS_SECONDS = 10.0
LAST_WORDS_MS = 1000
PATIENCE_MS = 2


class Launched(Protocol):
    """A step or batch that was begun."""

    @property
    def steps(self) -> int: ...

    @property
    def left(self) -> int: ...

    @property
    def done(self) -> bool: ...

    def result(self) -> StepResult | BatchResult: ...


class Runner(Protocol):
    """What runs the messages of one class: the engine steps, the runner of texts batches."""

    @property
    def takes(self) -> type[Step] | type[Batch]: ...

    @property
    def counters(self) -> Counters: ...

    def begin(self, message: Any) -> Launched: ...

    def rest(self) -> None:
        """Do what takes seconds, because there is nothing to compute."""
        ...


class Loop:
    """Owns the socket; `run` returns after `stop`. An exception of the engine ends it, and so the process: state on a
    device that failed is not to be trusted, and the scheduler replays the sequences on the next epoch."""

    def __init__(
        self,
        engine: Runner,
        hello: WorkerHello,
        endpoint: str,
        keys: Path | None = None,
        compilation: Compilation | None = None,
    ) -> None:
        self._engine = engine
        self._compilation = compilation
        self._hello = hello
        self._context: zmq.Context[Any] = zmq.Context()
        identity = worker_identity(hello.index, hello.epoch, os.getpid(), endpoint)
        self._socket = connect_dealer(self._context, endpoint, identity, keys)
        self._same_host = same_host(endpoint)
        self._goodbye = WorkerGoodbye(hello.index, hello.epoch)
        self._epoch = hello.epoch
        self._pending: deque[Launched] = deque()
        self._begun: tuple[Step, Launched] | None = None
        self._waiting: Step | Batch | None = None
        self._ended: tuple[int, int] | None = None
        self._stopping = False

    def stop(self) -> None:
        """Ends `run` after the step in progress; safe to call from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        next_hello = 0.0
        # Not at once: a request may have waited for this worker's first answer.
        began, rested = time.monotonic(), False
        try:
            while not self._stopping:
                now = time.monotonic()
                if self._compilation is not None and self._compilation.over and not self._pending:
                    self._compilation.settle()
                    self._compilation, self._hello = None, replace(self._hello, compiling=False)
                    next_hello = now
                if now >= next_hello:
                    phases.beat()
                    counters = self._engine.counters
                    self._send(encode(replace(self._hello, drafted=counters.drafted, accepted=counters.accepted)))
                    next_hello = now + HELLO_SECONDS
                    idle = not self._pending and now >= began + HELLO_SECONDS
                    if not rested and (idle or now >= began + RESTLESS_SECONDS):
                        rested = True
                        self._engine.rest()
                # What was begun is waited for when there is nothing more to begin, which the answer to the last step's
                # result brings, if anything does.
                waiting = PATIENCE_MS if self._left == 1 else int((next_hello - now) * 1000) + 1
                step = self._next(timeout_ms=0 if self._left > 1 else waiting)
                if step is not None:
                    self._begin(step)
                self._answer(leave=self._left - 1 if step is None or not self._pending else self._pending[-1].left)
            self._answer(leave=0)
            self._send(encode(self._goodbye))
        finally:
            # The goodbye may leave; after an exception nothing waits to be sent.
            self._context.destroy(linger=LAST_WORDS_MS)

    @property
    def _left(self) -> int:
        """Steps that were begun, or will be without another word, and whose results were not sent."""
        return sum(pending.left for pending in self._pending)

    @property
    def _again(self) -> Step | None:
        """What is left of the last step's repetitions once those are done that the engine has taken."""
        return None if self._begun is None else self._begun[0].after(self._begun[1].steps)

    def _begin(self, step: Step | Batch) -> None:
        pending = self._engine.begin(step)
        self._begun = (step, pending) if isinstance(step, Step) else None
        self._pending.append(pending)

    def _answer(self, leave: int) -> None:
        """Sends the results of steps that were begun, oldest first: those that are there, and all but the last few."""
        while self._pending and (self._left > leave or self._pending[0].done):
            pending = self._pending[0]
            result = pending.result()
            if not pending.left:
                self._pending.popleft()
            self._tell(result)

    def _tell(self, result: StepResult | BatchResult) -> None:
        """Sends a result, and with it whether the step's repetitions are over because another step has come."""
        again = self._again
        if again is not None and not self._pending and self._waiting is None:
            self._waiting = self._receive(0)
        if again is not None and self._waiting is not None:
            self._ended = again.incarnation, again.step - 1
        if isinstance(result, StepResult) and self._ended == (result.incarnation, result.step):
            result = replace(result, last=True)
        self._send(encode(result))

    def _next(self, timeout_ms: int) -> Step | Batch | None:
        """The step that has come; else the last one again, while it is to be repeated; else what comes in time."""
        step, again = self._waiting or self._receive(timeout_ms if self._again is None else 0), self._again
        if step is not None and again is not None:
            self._ended = again.incarnation, again.step - 1
        self._waiting, step = None, step or again
        return step

    def _receive(self, timeout_ms: int) -> Step | Batch | None:
        if not self._socket.poll(timeout_ms):
            return None
        try:
            message = decode(self._socket.recv(), ipc_peer=self._same_host)
        except WireError as error:
            log.warning("dropped a message: %s", error)
            return None
        if isinstance(message, Retire) and message.epoch == self._epoch:
            raise SystemExit(f"the scheduler has given this worker up: {message.reason}")
        if not isinstance(message, self._engine.takes) or message.epoch != self._epoch:
            log.warning("dropped a %s that is not for epoch %d", type(message).__name__, self._epoch)
            return None
        return message

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            log.warning("the scheduler has taken no message for a long time; one is lost")
