"""The scheduler's one loop: receive messages, send the next steps, send the results, check health.

Workers of other machines have a socket of their own: a peer chooses its name, so the socket says where it is.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import zmq

from interfaces import (
    Batch,
    Dismissal,
    DropAdapter,
    LoadAdapter,
    Ping,
    PixelStep,
    Results,
    ShipKv,
    Step,
    TakeKv,
    Vectors,
    VersionError,
    WeightsCommand,
    WireError,
    decode,
)
from scheduler.api_messages import ApiMessages
from scheduler.core import Scheduler
from scheduler.health import Health
from scheduler.kv_events import TURN_MS, KvEvents
from scheduler.process_watch import ProcessWatch
from scheduler.registration import Registration
from scheduler.worker_messages import WorkerMessages
from shared import phases
from shared.curve import bind_secure
from shared.endpoints import RunDirectory, is_local_worker
from shared.sockets import bind_router, readable, receive_from, router, send_to

log = logging.getLogger(__name__)

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
            self._send_to_worker,
            local_workers,
        )
        self._worker_identity = self._registration.identities
        self._of_workers = WorkerMessages(scheduler, self.health, self._registration, self._send_to_worker)
        self._of_replicas = ApiMessages(scheduler, self.health, self._send_to_replica, self._send_results)
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
                self._take(one, self._of_workers.handle)
            elif one is self._api:
                self._take(self._api, self._of_replicas.handle)
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

    def _send_to_replica(self, identity: bytes, message: Any) -> bool:
        return send_to(self._api, identity, message)

    def _send_to_worker(self, identity: bytes, message: Any) -> bool:
        return send_to(self._socket_of(identity), identity, message)

    def _socket_of(self, identity: bytes) -> zmq.Socket[bytes]:
        """The socket on which a worker is."""
        return self._workers if self._remote is None or is_local_worker(identity) else self._remote

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
