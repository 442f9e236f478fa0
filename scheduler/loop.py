"""The scheduler's one loop: receive what there is, send the next steps, send the news."""

from __future__ import annotations

import logging
import time
from typing import Any

import zmq

from interfaces import (
    Action,
    Cancel,
    Goodbye,
    Hello,
    Order,
    OrderAnswer,
    SessionOrder,
    StepResult,
    Submit,
    WireError,
    WorkerHello,
    decode,
)
from scheduler.core import Scheduler
from shared.endpoints import RunDirectory
from shared.sockets import bind_router, receive_from, send_to

log = logging.getLogger(__name__)

STATUS_SECONDS = 0.5
REPLICA_SILENCE_SECONDS = 5.0
MESSAGES_PER_TURN = 256
"""Messages taken from one socket before the other and the steps get their turn."""


class Loop:
    """Owns the two sockets; `run` returns after `stop`."""

    def __init__(self, scheduler: Scheduler, run_directory: RunDirectory) -> None:
        self.scheduler = scheduler
        self._context: zmq.Context[Any] = zmq.Context()
        self._api = bind_router(self._context, run_directory.api_endpoint)
        self._workers = bind_router(self._context, run_directory.worker_endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._api, zmq.POLLIN)
        self._poller.register(self._workers, zmq.POLLIN)
        self._worker_identity: dict[int, bytes] = {}
        self._last_heard: dict[bytes, float] = {}
        self._next_status = 0.0
        self._stopping = False

    def stop(self) -> None:
        """Ends `run` at its next turn; safe to call from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        try:
            while not self._stopping:
                self._receive()
                self._send_steps()
                self._send_news()
                self._keep_time()
        finally:
            self._context.destroy(linger=0)

    def _receive(self) -> None:
        wait_ms = int(max(0.0, self._next_status - time.monotonic()) * 1000) + 1
        ready = dict(self._poller.poll(wait_ms))
        for socket, handle in ((self._workers, self._from_worker), (self._api, self._from_api)):
            if socket not in ready:
                continue
            for _ in range(MESSAGES_PER_TURN):
                received = receive_from(socket)
                if received is None:
                    break
                self._guarded(handle, *received)

    def _guarded(self, handle: Any, identity: bytes, frames: list[bytes]) -> None:
        """No message, however wrong, ends this process."""
        try:
            if len(frames) != 1:
                raise WireError(f"{len(frames)} frames where one was expected")
            handle(identity, decode(frames[0], ipc_peer=True))
        except WireError as error:
            log.warning("dropped a message from %r: %s", identity, error)
        except Exception:
            log.exception("could not handle a message from %r", identity)

    def _from_api(self, identity: bytes, message: object) -> None:
        self._last_heard[identity] = time.monotonic()
        match message:
            case Submit():
                self.scheduler.submit(identity, message)
            case Cancel():
                self.scheduler.cancel(identity, message.handles.tolist())
            case Order():
                self._obey(identity, message)
            case SessionOrder():
                answer = self.scheduler.sessions.obey(message, self.scheduler.incarnation)
                send_to(self._api, identity, answer)
            case Hello():
                if identity not in self.scheduler.replicas:
                    log.info("API replica %s is here", message.replica)
                    self._next_status = 0.0
                self.scheduler.replica(identity)
            case Goodbye():
                self._drop_replica(identity, "said goodbye")
            case _:
                raise WireError(f"an API replica may not send {type(message).__name__}")

    def _obey(self, identity: bytes, order: Order) -> None:
        """Carries out an operator's order and answers, after the news that it makes."""
        refused, requests = "", 0
        match order.action:
            case Action.FLUSH_CACHE:
                refused = self.scheduler.flush_cache()
            case Action.ABORT:
                requests = self.scheduler.abort(order.request_ids)
            case Action.PAUSE | Action.CONTINUE:
                self.scheduler.paused = order.action == Action.PAUSE
                self._next_status = 0.0
            case Action.RETRACT:
                requests = self.scheduler.retract()
            case _:
                refused = f"there is no action {order.action}"
        self._send_news()
        send_to(self._api, identity, OrderAnswer(self.scheduler.incarnation, order.number, refused, requests))

    def _from_worker(self, identity: bytes, message: object) -> None:
        match message:
            case StepResult():
                self.scheduler.step_result(message)
            case WorkerHello():
                if self.scheduler.worker_hello(message):
                    log.info("worker %d (%s, epoch %d) is here", message.index, message.device, message.epoch)
                    self._worker_identity[message.index] = identity
                    self._next_status = 0.0
            case _:
                raise WireError(f"a worker may not send {type(message).__name__}")

    def _send_steps(self) -> None:
        for index, step in self.scheduler.next_steps():
            if not send_to(self._workers, self._worker_identity[index], step):
                log.warning("worker %d does not take step %d; waiting for its successor", index, step.step)

    def _send_news(self) -> None:
        for identity, results in self.scheduler.take_results():
            if not send_to(self._api, identity, results):
                self._drop_replica(identity, "does not take results")

    def _keep_time(self) -> None:
        now = time.monotonic()
        if now < self._next_status:
            return
        self._next_status = now + STATUS_SECONDS
        for identity in list(self.scheduler.replicas):
            if now - self._last_heard.get(identity, now) > REPLICA_SILENCE_SECONDS:
                self._drop_replica(identity, f"was silent for {REPLICA_SILENCE_SECONDS:.0f} s")
        self.scheduler.sessions.forget_idle()
        status = self.scheduler.status()
        for identity in list(self.scheduler.replicas):
            if not send_to(self._api, identity, status):
                self._drop_replica(identity, "is gone")

    def _drop_replica(self, identity: bytes, why: str) -> None:
        cancelled = self.scheduler.drop_replica(identity)
        self._last_heard.pop(identity, None)
        log.info("API replica %s %s; %d requests cancelled", identity.decode(errors="replace"), why, cancelled)
