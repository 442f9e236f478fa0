"""The scheduler without its sockets: requests in, steps out, step results in, results for the replicas out.

Everything here runs on one thread and never waits. `loop.py` carries the messages; tests drive this class directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from interfaces import (
    ErrorCode,
    KvMoved,
    KvPiece,
    KvTaken,
    Ready,
    RequestError,
    Results,
    Status,
    Step,
    StepResult,
    Submit,
    Vectors,
    WorkerHello,
    WorkerLeaves,
)
from scheduler import background, operator_commands, placement, results
from scheduler.adapter import AdapterFile
from scheduler.adapter_registry import AdapterRegistry
from scheduler.backlog import Backlog
from scheduler.batch import build_step
from scheduler.intake import Intake
from scheduler.limits import Limits
from scheduler.membership import Membership
from scheduler.oneshot import OneShotLane
from scheduler.oneshot_batches import OneShotBatches, OneShotResult, OneShotWork
from scheduler.open_requests import OpenRequests
from scheduler.placement_cost import Policy, least_cost
from scheduler.rebalancing import Rebalancing
from scheduler.sessions import Sessions
from scheduler.shipping import Shipping, ToOthers
from scheduler.status import status_of
from scheduler.stillness import StuckDetector, misplaced
from scheduler.weights_registry import WeightsRegistry
from scheduler.workers import Worker
from shared.weights_file import WeightsFile

_FromWorker = OneShotResult | Ready | KvMoved | KvPiece | KvTaken


class Scheduler:
    """State of all requests and workers. `incarnation` names this scheduler process in every message."""

    def __init__(
        self,
        limits: Limits,
        incarnation: int,
        clock: Callable[[], float] = time.monotonic,
        adapters: Mapping[str, str] | None = None,
        adapter_file: AdapterFile | None = None,
        weights_file: WeightsFile | None = None,
    ) -> None:
        """`adapters` has the paths of the adapters that the server starts with, by name."""
        self.limits = limits
        self.incarnation = incarnation
        self.clock = clock
        self.sessions = Sessions(clock)
        self.stuck_detector = StuckDetector(clock)
        self.requests = OpenRequests(incarnation, clock)
        self.workers = self.requests.workers
        self.replicas = self.requests.replicas
        self.waiting = self.requests.waiting
        self.outbox = self.requests.outbox
        self.streams = self.requests.streams
        self.request_log = self.requests.request_log
        self.counters = self.requests.counters
        self.policy: Policy = least_cost
        self.backlog = Backlog(self.requests, clock)
        kept = adapter_file or AdapterFile(None)
        self.adapters = AdapterRegistry(self.requests, incarnation, kept, adapters or {}, clock)
        self.oneshot = OneShotLane(self.requests, limits, clock, self.adapters.find)
        self.oneshot_batches = OneShotBatches(self.oneshot, self.requests, limits, incarnation)
        self.shipping = Shipping(self.requests, incarnation, clock)
        self.rebalancing = Rebalancing(self.requests, limits, clock)
        self.weights = WeightsRegistry(self.requests, incarnation, weights_file or WeightsFile(None))
        self._intake = Intake(self.requests, limits, self.oneshot, self.adapters, clock)
        computing = self.oneshot_batches, self.shipping, self.rebalancing
        self._membership = Membership(self.requests, limits, self.adapters, self.weights, *computing, clock)

    @property
    def running(self) -> int:
        return self.requests.running

    @property
    def paused(self) -> bool:
        """Whether an operator lets no step start."""
        return self.weights.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self.weights.pause(paused)

    # Requests

    def submit(self, identity: bytes, submit: Submit) -> None:
        """Take a request in, or refuse it with a reason."""
        self._intake.submit(identity, submit)

    def cancel(self, identity: bytes, handles: list[int]) -> None:
        """Cancel requests of a replica. Unknown handles are ignored."""
        self._intake.cancel(identity, handles)

    def detach(self, identity: bytes, handles: list[int]) -> None:
        """Detach requests whose client left. Resumable ones keep running; the others are cancelled."""
        self._intake.detach(identity, handles)

    def reconcile(self, identity: bytes, handles: list[int]) -> list[int]:
        """Detach all requests of a replica but `handles`, which it holds open. Returns the handles not known here."""
        return self._intake.reconcile(identity, handles)

    def drop_replica(self, identity: bytes) -> int:
        """Forget a replica and detach its requests. Returns their number."""
        return self._intake.drop_replica(identity)

    def expire(self) -> None:
        """Fail the requests whose time limit has passed, and cancel streams to which no client has come back."""
        for sequence, error in self.requests.deadlines.passed():
            self.requests.fail(sequence, error)
        self.oneshot.expire()
        for sequence in self.streams.expired():
            self.requests.cancel(sequence, "cancelled: its client has not come back for its stream")

    def look_for_stuck(self) -> None:
        """Put requests that are lost back into the queue, and fail those that have not progressed for too long."""
        everyone = self.replicas.all_sequences()
        for sequence in misplaced(everyone, self.waiting, self.workers):
            self.requests.requeue_misplaced(sequence)
        if self.paused or self.weights.changing:
            self.stuck_detector.grant_grace()
            self.oneshot.grant_grace()
        self.oneshot.look_for_stuck()
        for sequence, error in self.stuck_detector.stuck(everyone, self.workers):
            self.requests.fail(sequence, error)

    # Workers

    def worker_hello(self, hello: WorkerHello) -> bool:
        """Register a worker, or update what it says about itself. Returns True if it is new or restarted."""
        return self._membership.join(hello)

    def is_fenced(self, hello: WorkerHello) -> bool:
        """Whether this worker was given up. Others compute what it had, so it must end."""
        return self._membership.is_fenced(hello)

    def index_is_taken(self, hello: WorkerHello) -> bool:
        """Whether a worker of another supervisor has this index. The new one waits as long as that one lives."""
        return self._membership.index_is_taken(hello)

    def lose_worker(self, index: int, why: str = "died", blamed: bool = True) -> str:
        """Give a worker up, as `Membership.lose` does. Returns the event in one line."""
        return self._membership.lose(index, why, blamed)

    # Steps

    def next_steps(self) -> list[tuple[int, Step]]:
        """Place waiting sequences, then build at most one step for each worker that has room for one in flight."""
        if self.paused or self.weights.holds_steps:
            return []
        limits = self.limits
        self.shipping.advance()
        self.rebalancing.give_back()
        placement.place_waiting(self.requests, limits, self.policy, only_returning=self.weights.holds_requests)
        # Only now what waits finds no place: the others came a moment ago.
        self.rebalancing.advance(may_move=not self.weights.holds_requests)
        steps: list[tuple[int, Step]] = []
        for index, worker in self.workers.items():
            most = 1 if background.alone(worker) else limits.steps_in_flight
            if not worker.in_flight.has_room(most):
                continue  # as most workers, most of the time
            if worker.weights.ready and not worker.batches.keeps_steps_off and not worker.leaving:
                budget = limits.step_tokens(worker.hello), limits.most_guesses
                step = build_step(worker, self.incarnation, *budget, self.requests.preempt)
                if step is not None:
                    steps.append((index, step))
        return steps

    def next_batches(self) -> list[tuple[int, OneShotWork]]:
        """Build at most one batch of texts, or pass over images, for each worker that has room for it."""
        return [] if self.paused else self.oneshot_batches.next_batches()

    def next_shipments(self) -> list[tuple[int, ToOthers]]:
        """Messages for workers about the K and V of sequences that have changed their worker."""
        return [] if self.paused or self.weights.holds_steps else self.shipping.next_messages()

    def batch_result(self, result: OneShotResult) -> None:
        """Publish values of texts, or images. Results of other incarnations and epochs are ignored."""
        worker = self._sender(result)
        if worker is not None:
            self.oneshot_batches.result(worker, result)

    def step_result(self, result: StepResult) -> None:
        """Update the sequences from a step's result. Results of other incarnations and epochs are ignored."""
        worker = self.workers.get(result.index)
        # As in `_sender`, without a call: results of steps are most of the messages.
        if worker is None or result.incarnation != self.incarnation or result.epoch != worker.hello.epoch:
            return
        results.update(self.requests, worker, worker.receive(result))

    def images_ready(self, message: Ready) -> None:
        """Let rows run on whose images are encoded, and fail those whose images cannot be."""
        worker = self._sender(message)
        if worker is None:
            return
        complete, failed = worker.images.ready(message)
        for sequence, seconds in complete:
            took = f"encoded its images in {seconds:.3f} s" if seconds else "kept the features of its images"
            self.requests.record(sequence, f"worker {message.index} has {took}")
        for sequence, text in failed:
            self.requests.fail(sequence, RequestError(ErrorCode.FAILED, text))

    def kv_moved(self, message: KvMoved) -> None:
        """Let rows run on whose beginning is loaded, or could not be. Reports of others are ignored."""
        worker = self._sender(message)
        if worker is None:
            return
        for sequence, load, blocks, seconds in worker.beginnings.kv_moved(message):
            size = worker.block_size
            lost = (
                f"; {(len(load.blocks) - blocks) * size} could not be, and are computed"
                if blocks < len(load.blocks)
                else ""
            )
            self.requests.record(sequence, f"{blocks * size} tokens were loaded in {seconds * 1e3:.1f} ms{lost}")

    def worker_leaves(self, message: WorkerLeaves) -> None:
        """Hand the sequences of a worker over that is asked to end."""
        worker = self.workers.get(message.index)
        if worker is not None and message.epoch == worker.hello.epoch:
            self.shipping.leaves(worker)

    def kv_shipped(self, message: KvPiece | KvTaken) -> None:
        """Pass K and V on from one worker to another, or note that they are there. Reports of others are ignored."""
        if self._sender(message) is None:
            return
        if isinstance(message, KvPiece):
            self.shipping.came(message)
        else:
            self.shipping.taken(message)

    def _sender(self, message: _FromWorker) -> Worker | None:
        """The worker that a message is of; None if it is of another incarnation or epoch."""
        worker = self.workers.get(message.index)
        if worker is None or message.incarnation != self.incarnation or message.epoch != worker.hello.epoch:
            return None
        return worker

    # Messages for the replicas

    def take_results(self) -> list[tuple[bytes, Results]]:
        """The results since the last call, for the replicas that are still connected."""
        address = self.replicas.address
        taken = self.outbox.take()
        return [(identity, results) for number, results in taken if (identity := address(number, results))]

    def take_vectors(self) -> list[tuple[bytes, Vectors]]:
        """The values of texts since the last call. They are to be sent before results that are taken later."""
        addressed = []
        for number, vectors in self.outbox.take_vectors():
            identity = self.replicas.address(number, vectors)
            if identity is None:
                vectors.values.discard()
            else:
                addressed.append((identity, vectors))
        return addressed

    def status(self) -> Status:
        registries = self.oneshot, self.adapters, self.weights
        return status_of(self.incarnation, self.requests, self.limits, *registries, self.backlog.seconds())

    # Commands of operators

    def flush_cache(self) -> str:
        return operator_commands.flush_cache(self.requests)

    def abort(self, prefixes: list[str]) -> int:
        return operator_commands.abort(self.requests, prefixes) + self.oneshot.abort(prefixes)

    def retract(self) -> int:
        return operator_commands.retract(self.requests)
