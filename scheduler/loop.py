"""The scheduler's one loop: receive what there is, send the next steps, send the news."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from interfaces import (
    Action,
    Cancel,
    Detach,
    Goodbye,
    Hello,
    Inquiry,
    InquiryAnswer,
    Order,
    OrderAnswer,
    Retire,
    SessionOrder,
    StepResult,
    Submit,
    Unknown,
    WireError,
    WorkerGoodbye,
    WorkerHello,
    decode,
)
from scheduler.core import Scheduler
from scheduler.process_watch import ProcessWatch
from scheduler.stillness import LOOK_SECONDS
from shared import phases
from shared.curve import bind_secure
from shared.endpoints import RunDirectory, is_local_worker
from shared.sockets import bind_router, readable, receive_from, send_to

log = logging.getLogger(__name__)

STATUS_SECONDS = 0.5
REPLICA_SILENCE_SECONDS = 5.0
WORKER_SILENCE_SECONDS = 10.0
"""An idle worker speaks every second; a busy one is judged by its steps."""
CLOCK_JUMP_SECONDS = 5.0
"""Looks come every half second: one so late means that this process was stopped, or the whole machine suspended."""
SECONDS_BETWEEN_COMPLAINTS = 10.0
MESSAGES_PER_ITERATION = 256
"""Messages taken from one socket before the other and the steps get their turn."""


class Loop:
    """Owns the two sockets; `run` returns after `stop`."""

    def __init__(
        self, scheduler: Scheduler, run_directory: RunDirectory, worker_endpoint: str = "", curve_keys: str = ""
    ) -> None:
        self.scheduler = scheduler
        self._context: zmq.Context[Any] = zmq.Context()
        self._api = bind_router(self._context, run_directory.api_endpoint)
        self._workers = bind_router(self._context, run_directory.worker_endpoint)
        self._guard = bind_secure(self._workers, worker_endpoint, Path(curve_keys)) if worker_endpoint else None
        self._poller = zmq.Poller()
        self._poller.register(self._workers, zmq.POLLIN)
        self._poller.register(self._api, zmq.POLLIN)
        self._watch = ProcessWatch(self._poller, lambda index: run_directory.stack_file(f"model_worker:{index}"))
        self._worker_identity: dict[int, bytes] = {}
        self._worker_heard: dict[int, float] = {}
        self._put_off: dict[int, int] = {}
        self._suspected: set[int] = set()
        self._without_worker: float | None = None
        self._complained = 0.0
        self._last_heard: dict[bytes, float] = {}
        self._next_status = self._next_search = 0.0
        self._last_look = time.monotonic()
        self._stopping = False

    def stop(self) -> None:
        """Ends `run` at its next turn; safe to call from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        try:
            while not self._stopping:
                self._receive()
                self._send_steps()
                self._send_results()
                self._keep_time()
        finally:
            if self._guard is not None:
                # No handshake may be under way that asks a guard who has gone.
                self._workers.close(linger=0)
                self._guard.stop()
            self._context.destroy(linger=0)

    def _receive(self) -> None:
        wait_ms = int(max(0.0, self._next_status - time.monotonic()) * 1000) + 1
        ended = []
        for one, _ in self._poller.poll(wait_ms):
            if one is self._workers:
                self._take(self._workers, self._from_worker)
            elif one is self._api:
                self._take(self._api, self._from_api)
            else:
                ended.append(one)
        # After the messages: what a worker has said before its end counts.
        for index, epoch in self._watch.ended(ended):
            self._lose(index, epoch, "died")

    def _take(self, socket: zmq.Socket[bytes], handle: Any) -> None:
        """What a poll has found, and what else is there."""
        for i in range(MESSAGES_PER_ITERATION):
            received = receive_from(socket) if i == 0 or readable(socket) else None
            if received is None:
                return
            self._guarded(handle, *received, socket is self._api)

    def _guarded(self, handle: Any, identity: bytes, frames: list[bytes], ipc_peer: bool) -> None:
        """No message, however wrong, ends this process."""
        try:
            if len(frames) != 1:
                raise WireError(f"{len(frames)} frames where one was expected")
            handle(identity, decode(frames[0], ipc_peer=ipc_peer))
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
            case Detach():
                self.scheduler.detach(identity, message.handles.tolist())
            case Order():
                self._obey(identity, message)
            case SessionOrder():
                answer = self.scheduler.sessions.obey(message, self.scheduler.incarnation)
                send_to(self._api, identity, answer)
            case Hello():
                self._greet(identity, message)
            case Goodbye():
                self._drop_replica(identity, "said goodbye")
            case Inquiry():
                self._inform(identity, message.request_id)
            case _:
                raise WireError(f"an API replica may not send {type(message).__name__}")

    def _greet(self, identity: bytes, hello: Hello) -> None:
        """A replica is here, and says what it waits for: what is not known here it must submit again."""
        new = identity not in self.scheduler.replicas
        if new:
            log.info("API replica %s is here", hello.replica)
            self._next_status = 0.0
        unknown = self.scheduler.reconcile(identity, hello.handles.tolist())
        if unknown:
            # After what was to be sent: the end of one of them may be among it.
            self._send_results()
            send_to(self._api, identity, Unknown(self.scheduler.incarnation, np.array(unknown, np.int32), new))

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
        self._send_results()
        send_to(self._api, identity, OrderAnswer(self.scheduler.incarnation, order.number, refused, requests))

    def _from_worker(self, identity: bytes, message: object) -> None:
        match message:
            case StepResult():
                known = self.scheduler.workers.get(message.index)
                if known is not None and known.hello.epoch == message.epoch:
                    self._worker_heard[message.index] = time.monotonic()
                    self.scheduler.step_result(message)
            case WorkerHello():
                self._register_worker(identity, message)
            case WorkerGoodbye():
                self._lose(message.index, message.epoch, "said goodbye", blamed=False)
            case _:
                raise WireError(f"a worker may not send {type(message).__name__}")

    def _register_worker(self, identity: bytes, hello: WorkerHello) -> None:
        if self.scheduler.is_fenced(hello):
            send_to(self._workers, identity, Retire(hello.epoch, "it was late or silent, or another came in its place"))
            return
        if self.scheduler.index_is_taken(hello):
            if self._put_off.get(hello.index) != hello.epoch:
                self._put_off[hello.index] = hello.epoch
                log.warning("another worker %d is here already: %r waits until it has gone", hello.index, identity)
            return
        self._worker_heard[hello.index] = time.monotonic()
        if not self.scheduler.worker_hello(hello):
            return
        log.info("worker %d (%s, epoch %d) is here", hello.index, hello.device, hello.epoch)
        self._worker_identity[hello.index] = identity
        self._next_status = 0.0
        if is_local_worker(identity) and not self._watch.add(hello.index, hello.epoch, hello.pid):
            self._lose(hello.index, hello.epoch, "died")

    def _lose(self, index: int, epoch: int, why: str, blamed: bool = True) -> None:
        worker = self.scheduler.workers.get(index)
        if worker is not None and worker.hello.epoch == epoch:
            story = self.scheduler.lose_worker(index, why, blamed)
            log.log(logging.ERROR if blamed else logging.INFO, "%s", story)
            self._next_status = 0.0

    def _inform(self, identity: bytes, request_id: str) -> None:
        request_log = self.scheduler.request_log
        lines = request_log.of(request_id) if request_id else request_log.events
        send_to(self._api, identity, InquiryAnswer(self.scheduler.incarnation, lines, self.scheduler.status()))

    def _send_steps(self) -> None:
        # Until each worker has as many as it may have: a result may be the next thing that there is to receive.
        while steps := self.scheduler.next_steps():
            for index, step in steps:
                if not send_to(self._workers, self._worker_identity[index], step):
                    # What it never got cannot be why it is gone.
                    self._lose(index, step.epoch, f"does not take step {step.step}", blamed=False)

    def _send_results(self) -> None:
        for identity, results in self.scheduler.take_results():
            if not send_to(self._api, identity, results):
                self._drop_replica(identity, "does not take results")

    def _keep_time(self) -> None:
        now = time.monotonic()
        if now < self._next_status:
            return
        phases.beat()
        self._next_status = now + STATUS_SECONDS
        if now - self._last_look > CLOCK_JUMP_SECONDS:
            self._excuse_silence(now)
        self._last_look = now
        for identity in list(self.scheduler.replicas):
            if now - self._last_heard.get(identity, now) > REPLICA_SILENCE_SECONDS:
                self._drop_replica(identity, f"was silent for {REPLICA_SILENCE_SECONDS:.0f} s")
        self.scheduler.sessions.forget_idle()
        # Whoever only asked something is no replica and will not say goodbye.
        self._last_heard = {name: at for name, at in self._last_heard.items() if name in self.scheduler.replicas}
        self._look_after_workers(now)
        self.scheduler.expire(now)
        if now >= self._next_search:
            self._next_search = now + LOOK_SECONDS
            self.scheduler.look_for_stuck(now)
        status = self.scheduler.status()
        for identity in list(self.scheduler.replicas):
            if not send_to(self._api, identity, status):
                self._drop_replica(identity, "is gone")

    def _excuse_silence(self, now: float) -> None:
        """While everything stood still nobody could speak or be heard: all have their time from now on."""
        log.warning("this process stood still for %.1f s; nobody is blamed for that time", now - self._last_look)
        self._last_heard = dict.fromkeys(self._last_heard, now)
        self._worker_heard = dict.fromkeys(self._worker_heard, now)
        self.scheduler.stuck_detector.grant_grace(now)
        for worker in self.scheduler.workers.values():
            worker.last_step = now

    def _look_after_workers(self, now: float) -> None:
        """Gives up workers that stall, at the second look: this process may itself have been stopped for a while."""
        found = {index: why for index in self.scheduler.workers if (why := self._complaint(index, now))}
        for index in self._suspected & found.keys():
            epoch = self.scheduler.workers[index].hello.epoch
            self._watch.mark_stalled(index, epoch, self.scheduler.lose_worker(index, found[index]))
            self._next_status = 0.0
        self._suspected = found.keys() - self._suspected
        for story in self._watch.kill_due(now):
            log.error("%s", story)
            self.scheduler.request_log.record_event(story)
        self._explain_waiting(now)

    def _complaint(self, index: int, now: float) -> str:
        worker = self.scheduler.workers[index]
        late = worker.late(now)
        if late:
            allowed = worker.step_deadline.allowed(worker.in_flight[0].tokens)
            return f"stalled: the step has taken {late:.1f} s where {allowed:.1f} s were allowed"
        silent = now - self._worker_heard.get(index, now)
        if not worker.in_flight and silent > WORKER_SILENCE_SECONDS:
            return f"was silent for {silent:.1f} s"
        return ""

    def _explain_waiting(self, now: float) -> None:
        """Whoever waits long is told about: for what, and since when."""
        waiting = len(self.scheduler.waiting)
        if self.scheduler.workers or not waiting:
            self._without_worker = None
            return
        self._without_worker = self._without_worker or now
        since = now - self._without_worker
        if since > SECONDS_BETWEEN_COMPLAINTS and now - self._complained > SECONDS_BETWEEN_COMPLAINTS:
            self._complained = now
            log.warning("%d requests have waited for a model worker for %.0f s; none is here", waiting, since)

    def _drop_replica(self, identity: bytes, why: str) -> None:
        cancelled = self.scheduler.drop_replica(identity)
        self._last_heard.pop(identity, None)
        text = f"API replica {identity.decode(errors='replace')} {why}; {cancelled} requests cancelled"
        self.scheduler.request_log.record_event(text)
        log.info("%s", text)
