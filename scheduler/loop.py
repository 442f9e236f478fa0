"""The scheduler's one loop: receive messages, send the next steps, send the results, check health.

Workers of other machines have a socket of their own: a peer chooses its name, so the socket says where it is.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from interfaces import (
    Action,
    AdapterFailed,
    AdapterLoaded,
    AdapterOrder,
    Batch,
    BatchResult,
    Cancel,
    DecisionsAnswer,
    DecisionsInquiry,
    Detach,
    Dismissal,
    DropAdapter,
    Goodbye,
    Hello,
    Inquiry,
    InquiryAnswer,
    KvMoved,
    KvPiece,
    KvTaken,
    LoadAdapter,
    Order,
    OrderAnswer,
    Ping,
    PixelResult,
    PixelStep,
    Ready,
    Results,
    Retire,
    SessionOrder,
    ShipKv,
    Step,
    StepResult,
    Submit,
    TakeKv,
    Unknown,
    Vectors,
    VersionError,
    WeightsCommand,
    WeightsOrder,
    WeightsReport,
    WireError,
    WorkerGoodbye,
    WorkerHello,
    WorkerLeaves,
    decode,
)
from scheduler.core import Scheduler
from scheduler.health import Health
from scheduler.kv_events import TURN_MS, KvEvents
from scheduler.process_watch import ProcessWatch
from scheduler.registration import Registration
from shared import phases
from shared.curve import bind_secure
from shared.endpoints import RunDirectory, is_local_worker
from shared.sockets import bind_router, readable, receive_from, router, send_to

log = logging.getLogger(__name__)

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
ToWorker = Step | Batch | PixelStep | ShipKv | TakeKv | Dismissal | LoadAdapter | DropAdapter | WeightsCommand

# Messages taken from one socket before the other socket and the steps are served.
MESSAGES_PER_ITERATION = 256
# Most messages to a replica that go as one: few enough that it serves its clients between two of them.
MESSAGES_TOGETHER = 32


class Loop:
    """Owns the sockets. `run` returns after `stop`."""

    def __init__(
        self,
        scheduler: Scheduler,
        run_directory: RunDirectory,
        worker_endpoint: str = "",
        curve_keys: str = "",
        local_workers: int = 1,
    ) -> None:
        """Indices from `local_workers` on are for workers of other machines, which come to `worker_endpoint`."""
        self.scheduler = scheduler
        self._context: zmq.Context[Any] = zmq.Context()
        self._api = bind_router(self._context, run_directory.api_endpoint)
        self._workers = bind_router(self._context, run_directory.worker_endpoint)
        # Of workers of other machines; None where none may come.
        self._remote = router(self._context) if worker_endpoint else None
        self._guard = bind_secure(self._remote, worker_endpoint, Path(curve_keys)) if self._remote is not None else None
        self._poller = zmq.Poller()
        self._poller.register(self._workers, zmq.POLLIN)
        if self._remote is not None:
            self._poller.register(self._remote, zmq.POLLIN)
        self._poller.register(self._api, zmq.POLLIN)
        self._watch = ProcessWatch(
            self._poller, lambda index: run_directory.stack_file(f"model_worker:{index}"), scheduler.clock
        )
        self.health = Health(scheduler, self._watch, scheduler.clock)
        self._registration = Registration(
            scheduler,
            self.health,
            self._watch,
            lambda identity, message: send_to(self._socket_of(identity), identity, message),
            local_workers,
        )
        self._worker_identity = self._registration.identities
        self._curve_keys = curve_keys
        self._kv_events: KvEvents | None = None
        self._stopping = False

    def publish_kv_events(self, endpoint: str, model: str) -> None:
        """Publish the changes of prefix caches from now on. SettingsError as `KvEvents`."""
        keys = Path(self._curve_keys) if self._guard is not None else None
        self._kv_events = KvEvents(self._context, endpoint, model, keys)
        self._poller.register(self._kv_events.requests, zmq.POLLIN)

    def stop(self) -> None:
        """End `run` at its next iteration. Safe to call from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        try:
            while not self._stopping:
                self._receive()
                self._send_steps()
                self._send_results()
                self._check_health()
        finally:
            if self._kv_events is not None:
                self._kv_events.close()
            if self._guard is not None and self._remote is not None:
                # A handshake under way asks the guard, so the socket closes first.
                self._remote.close(linger=0)
                self._guard.stop()
            self._context.destroy(linger=0)

    def _receive(self) -> None:
        wait_ms = int(self.health.seconds_left() * 1000) + 1
        if self._kv_events is not None and self._kv_events.owes:
            wait_ms = min(wait_ms, TURN_MS)
        ended = []
        for one, _ in self._poller.poll(wait_ms):
            if one is self._workers or (self._remote is not None and one is self._remote):
                self._take(one, self._from_worker)
            elif one is self._api:
                self._take(self._api, self._from_api)
            elif self._kv_events is None or one is not self._kv_events.requests:
                ended.append(one)
        # After the messages: what a worker sent before its end counts.
        for index, epoch in self._watch.ended(ended):
            self.health.lose_worker(index, epoch, "died")
        if self._kv_events is not None:
            self._kv_events.attach(self.scheduler.workers)

    def _take(self, socket: zmq.Socket[bytes], handle: Any) -> None:
        """Handle the message that a poll has found, and those behind it."""
        for i in range(MESSAGES_PER_ITERATION):
            received = receive_from(socket) if i == 0 or readable(socket) else None
            if received is None:
                return
            identity, frames = received
            local = is_local_worker(identity)
            if local and socket is self._remote:
                log.warning("dropped a message from %r: a worker of another machine may not have such a name", identity)
            else:
                self._guarded(handle, identity, frames, socket is self._api or local)

    def _guarded(self, handle: Any, identity: bytes, frames: list[bytes], ipc_peer: bool) -> None:
        """Handle one message. No message, however wrong, ends this process."""
        try:
            if len(frames) != 1:
                raise WireError(f"{len(frames)} frames where one was expected")
            handle(identity, decode(frames[0], ipc_peer=ipc_peer))
        except WireError as error:
            log.warning("dropped a message from %r: %s", identity, error)
            if isinstance(error, VersionError) and not ipc_peer:
                # It cannot read this either, and its log then has both versions, too.
                send_to(self._remote or self._workers, identity, Ping(self.scheduler.incarnation))
        except Exception:
            log.exception("could not handle a message from %r", identity)

    def _from_api(self, identity: bytes, message: object) -> None:
        self.health.replica_heard(identity)
        match message:
            case Submit():
                self.scheduler.submit(identity, message)
            case Cancel():
                self.scheduler.cancel(identity, message.handles.tolist())
            case Detach():
                self.scheduler.detach(identity, message.handles.tolist())
            case Order():
                self._run_command(identity, message)
            case SessionOrder():
                answer = self.scheduler.sessions.obey(message, self.scheduler.incarnation)
                send_to(self._api, identity, answer)
            case AdapterOrder():
                self.scheduler.adapters.obey(identity, message)
                self.health.check_soon()
            case WeightsOrder():
                self.scheduler.weights.obey(identity, message)
                self.health.check_soon()
            case Hello():
                self._register_replica(identity, message)
            case Goodbye():
                self.health.drop_replica(identity, "said goodbye")
            case Inquiry():
                self._answer_inquiry(identity, message.request_id)
            case DecisionsInquiry():
                decisions = self.scheduler.request_log.decisions(message.request_ids)
                send_to(self._api, identity, DecisionsAnswer(self.scheduler.incarnation, message.number, decisions))
            case _:
                raise WireError(f"an API replica may not send {type(message).__name__}")

    def _register_replica(self, identity: bytes, hello: Hello) -> None:
        """Register a replica, and send it the requests that it holds open but that are not known here.

        It submits those again.
        """
        new = self.scheduler.replicas.greet(identity)
        if new:
            log.info("API replica %s is here", hello.replica)
            self.health.check_soon()
        unknown = self.scheduler.reconcile(identity, hello.handles.tolist())
        if unknown:
            # After the results: they may have the end of one of these requests.
            self._send_results()
            send_to(self._api, identity, Unknown(self.scheduler.incarnation, np.array(unknown, np.int32), new))

    def _run_command(self, identity: bytes, order: Order) -> None:
        """Carry out an operator's command and answer, after the results that it makes."""
        refused = ""
        requests = 0
        match order.action:
            case Action.FLUSH_CACHE:
                refused = self.scheduler.flush_cache()
            case Action.ABORT:
                requests = self.scheduler.abort(order.request_ids)
            case Action.PAUSE | Action.CONTINUE:
                self.scheduler.paused = order.action == Action.PAUSE
                self.health.check_soon()
            case Action.RETRACT:
                requests = self.scheduler.retract()
            case Action.DRAIN:
                self.scheduler.requests.drain.begin()
                requests = self._ending()
                self.health.check_soon()
            case Action.DRAIN_ON:
                refused = self.scheduler.requests.drain.go_on()
                requests = self._ending()
            case _:
                refused = f"there is no action {order.action}"
        self._send_results()
        send_to(self._api, identity, OrderAnswer(self.scheduler.incarnation, order.number, refused, requests))

    def _ending(self) -> int:
        """The number of requests whose end is near: none while nothing is computed."""
        still = self.scheduler.paused or self.scheduler.weights.absent
        return 0 if still else self.scheduler.requests.started

    def _socket_of(self, identity: bytes) -> zmq.Socket[bytes]:
        """The socket on which a worker is."""
        return self._workers if self._remote is None or is_local_worker(identity) else self._remote

    def _from_worker(self, identity: bytes, message: object) -> None:
        if isinstance(message, OfWorker) and not self._registration.speaks_for(identity, message.index):
            # It was given up and another one has its index, or it never had this one.
            return
        match message:
            case StepResult():
                known = self.scheduler.workers.get(message.index)
                if known is not None and known.hello.epoch == message.epoch:
                    self.health.worker_heard(message.index)
                    self.scheduler.step_result(message)
            case BatchResult() | PixelResult():
                known = self.scheduler.workers.get(message.index)
                if known is not None and known.hello.epoch == message.epoch:
                    self.health.worker_heard(message.index)
                    self.scheduler.batch_result(message)
            case Ready():
                known = self.scheduler.workers.get(message.index)
                if known is not None and known.hello.epoch == message.epoch:
                    self.health.worker_heard(message.index)
                    self.scheduler.images_ready(message)
            case KvMoved():
                self.scheduler.kv_moved(message)
            case KvPiece() | KvTaken():
                self.health.worker_heard(message.index)
                self.scheduler.kv_shipped(message)
            case WorkerLeaves():
                self.scheduler.worker_leaves(message)
            case AdapterLoaded() | AdapterFailed():
                self._hear_of_adapter(message)
            case WeightsReport():
                self._hear_of_weights(identity, message)
            case WorkerHello():
                self._registration.hear(identity, message)
            case WorkerGoodbye():
                story = f"cannot go on: {message.reason}" if message.reason else "said goodbye"
                self.health.lose_worker(message.index, message.epoch, story, bool(message.reason) and message.blamed)
            case _:
                raise WireError(f"a worker may not send {type(message).__name__}")

    def _hear_of_adapter(self, message: AdapterLoaded | AdapterFailed) -> None:
        known = self.scheduler.workers.get(message.index)
        if known is None or known.hello.epoch != message.epoch:
            return
        self.health.worker_heard(message.index)
        if isinstance(message, AdapterLoaded):
            self.scheduler.adapters.loaded(message)
        else:
            self.scheduler.adapters.failed(message)
        self.health.check_soon()

    def _hear_of_weights(self, identity: bytes, report: WeightsReport) -> None:
        known = self.scheduler.workers.get(report.index)
        if known is None or known.hello.epoch != report.epoch:
            return
        self.health.worker_heard(report.index)
        problem = self.scheduler.weights.heard(report)
        if problem:
            self.health.lose_worker(report.index, report.epoch, problem, blamed=False)
            send_to(self._socket_of(identity), identity, Retire(report.epoch, problem))
        self.health.check_soon()

    def _answer_inquiry(self, identity: bytes, request_id: str) -> None:
        request_log = self.scheduler.request_log
        lines = request_log.of(request_id) if request_id else request_log.events
        send_to(self._api, identity, InquiryAnswer(self.scheduler.incarnation, lines, self.scheduler.status()))

    def _send_steps(self) -> None:
        # Until each worker has as many as it may have: the next message to receive may be a result.
        while work := self._next_work():
            for index, sent in work:
                identity = self._worker_identity[index]
                if send_to(self._socket_of(identity), identity, sent):
                    continue
                # The worker did not get it, so it cannot be the reason.
                worker = self.scheduler.workers.get(index)
                if worker is not None and worker.remote:
                    self._registration.cut_off(index, f"does not take {_named(sent)}")
                else:
                    self.health.lose_worker(index, sent.epoch, f"does not take {_named(sent)}", blamed=False)

        if self._kv_events is not None:
            self._kv_events.publish(self.scheduler.workers)

    def _next_work(self) -> list[tuple[int, ToWorker]]:
        self.scheduler.weights.advance()
        work: list[tuple[int, ToWorker]] = []
        work += self.scheduler.next_batches()
        work += self.scheduler.next_steps()
        # A step comes after the message about an adapter that its rows need, and blocks are filled after the steps that
        # may still write to them.
        adapters = self.scheduler.adapters.take_messages()
        return [*adapters, *work, *self.scheduler.next_shipments(), *self.scheduler.weights.take_messages()]

    def _send_results(self) -> None:
        # In the order in which they are numbered.
        sent: dict[bytes, list[Vectors | Results]] = {}
        for identity, vectors in self.scheduler.take_vectors():
            sent.setdefault(identity, []).append(vectors)
        for identity, results in self.scheduler.take_results():
            sent.setdefault(identity, []).append(results)
        for identity, messages in sent.items():
            for first in range(0, len(messages), MESSAGES_TOGETHER):
                if not send_to(self._api, identity, *messages[first : first + MESSAGES_TOGETHER]):
                    self.health.drop_replica(identity, "does not take results")
                    break
        for identity, answer in self.scheduler.adapters.take_answers():
            send_to(self._api, identity, answer)
        for identity, changed in self.scheduler.weights.take_answers():
            send_to(self._api, identity, changed)

    def _check_health(self) -> None:
        if not self.health.due():
            return
        phases.beat()
        if self.scheduler.adapters.fatal:
            phases.fatal(self.scheduler.adapters.fatal)
            raise SystemExit(self.scheduler.adapters.fatal)
        self.health.check()
        self._registration.ping()
        if self._guard is not None and self._guard.refresh():
            log.info("the list of peers that may connect has changed")
        status = self.scheduler.status()
        for identity in list(self.scheduler.replicas):
            if not send_to(self._api, identity, status):
                self.health.drop_replica(identity, "is gone")


def _named(sent: ToWorker) -> str:
    match sent:
        case Step():
            return f"step {sent.step}"
        case Batch():
            return f"batch {sent.number}"
        case PixelStep():
            return f"pass {sent.number}"
        case WeightsCommand():
            return f"a message about its weights ({sent.number})"
        case ShipKv() | TakeKv():
            return f"a piece of a KV cache ({sent.ticket})"
        case Dismissal():
            return "its dismissal"
    return f"a message about adapter {sent.handle}"
