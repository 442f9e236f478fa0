"""The scheduler without its sockets: requests in, steps out, step results in, results for the replicas out.

Everything here runs on one thread and never waits. `loop.py` carries the messages; tests drive this class directly.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

from interfaces import (
    GENERATE,
    NO_IMAGES,
    ErrorCode,
    Finish,
    KvMoved,
    KvPiece,
    KvTaken,
    PoolingContext,
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
from scheduler.limits import Limits
from scheduler.oneshot import OneShotLane
from scheduler.oneshot_adapters import gone
from scheduler.oneshot_batches import OneShotBatches, OneShotResult, OneShotWork
from scheduler.open_requests import OpenRequests
from scheduler.placement_cost import Policy, least_cost
from scheduler.rebalancing import Rebalancing
from scheduler.replicas import NO_REPLICA
from scheduler.resumable_streams import Stream
from scheduler.sequence import Sequence
from scheduler.sessions import Sessions
from scheduler.shipping import Shipping, ToOthers
from scheduler.stillness import StuckDetector, misplaced
from scheduler.succession import FencedEpochs, same_supervisor
from scheduler.weights_registry import WeightsRegistry
from scheduler.workers import Worker
from shared.weights_file import WeightsFile


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
        self._order = itertools.count()
        self._fenced = FencedEpochs()

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
        replica = self.replicas.register(identity)
        self.cancel(identity, [submit.handle])
        if isinstance(submit.context, PoolingContext):
            self.oneshot.submit(identity, submit, submit.context, next(self._order))
            return
        stream = self.streams.find(submit)
        if stream is not None and stream.has_all(submit.text):
            self._reattach(stream, identity, submit)
            return
        if stream is not None and stream.finished == Finish.ACTIVE:
            # The new request samples the same tokens again, with everything that was published about them.
            before = stream.sequence
            self.outbox.end(self.replicas.number_of(before), before.handle, Finish.CANCELLED)
            self.requests.forget(before)
        error = self._refusal(submit)
        if error is not None:
            self.counters["failed"] += 1
            self.request_log.record(submit.context.request_id, f"refused: {error.message}")
            self.outbox.fail(replica.number, submit.handle, error)
            return
        sequence = Sequence.of(identity, submit, next(self._order), self.clock)
        sequence.checked = bool(self.workers)
        sequence.adapter = self.adapters.find(submit.text) if submit.text.adapter else None
        self.requests.add(sequence)

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

    def detach(self, identity: bytes, handles: list[int]) -> None:
        """Detach requests whose client left. Resumable ones keep running; the others are cancelled."""
        for handle in handles:
            sequence = self.replicas.sequence(identity, handle)
            stream = self.streams.of(sequence)
            if sequence is None or stream is None:
                self.cancel(identity, [handle])
                continue
            self.requests.record(sequence, f"its client is gone; it goes on, from {sequence.emitted} tokens")
            self.streams.orphan(stream)
            self.requests.change_listener(sequence, NO_REPLICA, handle)

    def cancel(self, identity: bytes, handles: list[int]) -> None:
        """Cancel requests of a replica. Unknown handles are ignored."""
        for handle in handles:
            sequence = self.replicas.sequence(identity, handle)
            if sequence is not None:
                text = f"cancelled by its API process, which had {sequence.emitted} tokens"
                self.requests.cancel(sequence, text)
            else:
                self.oneshot.cancel(identity, handle)

    def reconcile(self, identity: bytes, handles: list[int]) -> list[int]:
        """Detach all requests of a replica but `handles`, which it holds open. Returns the handles not known here."""
        known = {*self.replicas.register(identity).sequences, *self.oneshot.handles(identity)}
        named = set(handles)
        self.detach(identity, [handle for handle in known if handle not in named])
        return [handle for handle in handles if handle not in known]

    def drop_replica(self, identity: bytes) -> int:
        """Forget a replica and detach its requests. Returns their number."""
        replica = self.replicas.get(identity)
        if replica is None:
            return 0
        handles = [*replica.sequences, *self.oneshot.handles(identity)]
        self.detach(identity, handles)
        self.replicas.drop(identity)
        return len(handles)

    # Workers

    def worker_hello(self, hello: WorkerHello) -> bool:
        """Register a worker, or update what it says about itself.

        Returns True if it is new or restarted. Then the sequences of its predecessor are back in the queue.
        """
        known = self.workers.get(hello.index)
        if known is not None and known.hello.epoch == hello.epoch:
            known.hello = hello  # some of it changes
        if self.is_fenced(hello) or self.index_is_taken(hello):
            return False
        if known is not None and known.hello.epoch >= hello.epoch:
            return False
        if known is not None:
            self.lose_worker(hello.index, "was followed by its next epoch")
        worker = Worker(hello, *self.limits.of_worker, clock=self.clock)
        self.workers[hello.index] = worker
        self.adapters.worker_joined(worker)
        self.weights.worker_joined(worker)
        self.request_log.record_event(f"{worker.describe()} is here")
        return True

    def is_fenced(self, hello: WorkerHello) -> bool:
        """Whether this worker was given up. Others compute what it had, so it must end."""
        return self._fenced.has(hello.index, hello.epoch)

    def index_is_taken(self, hello: WorkerHello) -> bool:
        """Whether a worker of another supervisor has this index. The new one waits as long as that one lives."""
        known = self.workers.get(hello.index)
        return known is not None and not same_supervisor(known.hello.epoch, hello.epoch)

    def lose_worker(self, index: int, why: str = "died", blamed: bool = True) -> str:
        """Give a worker up. Its sequences wait again, in their old order, with the tokens their clients have.

        If `blamed`, one of the sequences that it was computing may be the reason. Returns the event in one line.
        """
        worker = self.requests.take_worker(index)
        # One that was asked to end may be killed when it takes too long, whatever it computes.
        blamed = blamed and not worker.leaving
        self._fenced.add(index, worker.hello.epoch)
        story = f"{worker.describe()} {why}"
        self.oneshot_batches.lose_worker(worker, story, blamed)
        self.adapters.worker_lost(worker, blamed)
        self.weights.worker_lost(worker, blamed)
        computing = [*worker.in_flight.computing(), *worker.images.encoding()]
        suspects = {sequence.order for sequence in computing} if blamed else set()
        for row in worker.rows.occupied().tolist():
            self._recover(worker.remove(row), story, suspects)
        self.shipping.lose_worker(worker)
        self.rebalancing.lose_worker(worker)
        self.request_log.record_event(story)
        return story

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
        worker = self.workers.get(result.index)
        if worker is not None and (result.incarnation, result.epoch) == (self.incarnation, worker.hello.epoch):
            self.oneshot_batches.result(worker, result)

    def step_result(self, result: StepResult) -> None:
        """Update the sequences from a step's result. Results of other incarnations and epochs are ignored."""
        worker = self.workers.get(result.index)
        if worker is None or result.incarnation != self.incarnation or result.epoch != worker.hello.epoch:
            return
        results.update(self.requests, worker, worker.receive(result))

    def images_ready(self, message: Ready) -> None:
        """Let rows run on whose images are encoded, and fail those whose images cannot be."""
        worker = self.workers.get(message.index)
        if worker is None or message.incarnation != self.incarnation or message.epoch != worker.hello.epoch:
            return
        complete, failed = worker.images.ready(message)
        for sequence, seconds in complete:
            took = f"encoded its images in {seconds:.3f} s" if seconds else "kept the features of its images"
            self.requests.record(sequence, f"worker {message.index} has {took}")
        for sequence, text in failed:
            self.requests.fail(sequence, RequestError(ErrorCode.FAILED, text))

    def kv_moved(self, message: KvMoved) -> None:
        """Let rows run on whose beginning is loaded, or could not be. Reports of others are ignored."""
        worker = self.workers.get(message.index)
        if worker is None or message.incarnation != self.incarnation or message.epoch != worker.hello.epoch:
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
        worker = self.workers.get(message.index)
        if worker is None or message.incarnation != self.incarnation or message.epoch != worker.hello.epoch:
            return
        if isinstance(message, KvPiece):
            self.shipping.came(message)
        else:
            self.shipping.taken(message)

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
        everyone = self.workers.values()
        workers = placement.doing(GENERATE, everyone) or everyone
        pooling = [worker for worker in everyone if worker.pools]
        reason = self._why_not_ready()
        return Status(
            incarnation=self.incarnation,
            ready=not reason,
            reason=reason,
            workers=[worker.status() for worker in everyone],
            waiting=len(self.waiting) + self.oneshot.waiting,
            running=self.running + self.oneshot.running,
            max_model_len=placement.max_model_len(workers, self.limits.max_model_len),
            max_running=sum(len(worker.rows.sequences) for worker in workers),
            block_size=min((worker.block_size for worker in workers), default=0),
            vocab_size=placement.vocab_size(workers),
            counters={**self.requests.counted(), "adapter_evictions": self.adapters.evictions},
            hidden_size=placement.hidden_size(workers),
            tasks=placement.tasks(everyone),
            vector_width=placement.hidden_size(pooling),
            labels=next((worker.hello.labels for worker in pooling if worker.hello.labels), []),
            codec=next((worker.hello.codec for worker in pooling if worker.hello.codec), None),
            images=min((worker.hello.images for worker in placement.doing(GENERATE, everyone)), default=NO_IMAGES),
            adapters=self.adapters.status(),
            takes_adapters=any(worker.adapters.takes_any for worker in everyone),
            processors=placement.processors(placement.doing(GENERATE, everyone)),
            paused=self.paused,
            weights=self.weights.status(),
            backlog_seconds=self.backlog.seconds(),
        )

    # Commands of operators

    def flush_cache(self) -> str:
        return operator_commands.flush_cache(self.requests)

    def abort(self, prefixes: list[str]) -> int:
        return operator_commands.abort(self.requests, prefixes) + self.oneshot.abort(prefixes)

    def retract(self) -> int:
        return operator_commands.retract(self.requests)

    # Inside

    def _why_not_ready(self) -> str:
        if not self.workers:
            return "no model worker is ready yet"
        if self.adapters.starting:
            return "the adapters of the setting lora are being loaded"
        return self.weights.standstill

    def _refusal(self, submit: Submit) -> RequestError | None:
        open_of_tenant = self.requests.open_of(submit.scheduling.tenant)
        waiting = self.waiting
        number, tokens = len(waiting), waiting.tokens
        if not submit.scheduling.in_background:
            # Those of batches may wait for as long as others run: they fill no queue for these.
            number, tokens = number - waiting.background, tokens - waiting.background_tokens
        full = self.limits.refusal(number, tokens, len(submit.text.tokens), open_of_tenant)
        if full is not None and not submit.again:
            return RequestError(ErrorCode.OVERLOADED, full)
        context = submit.text
        if context.adapter and self.adapters.find(context) is None:
            return gone(context)
        # Requests also wait while a worker restarts. Whether they fit is checked when it is there.
        workers = self.workers.values()
        if not workers:
            return None
        return placement.misfit(submit.text, workers, self.limits.max_model_len)

    def _recover(self, sequence: Sequence, story: str, suspects: set[int]) -> None:
        """Put a sequence of a lost worker back into the queue, unless too many workers crashed with it."""
        quarantine = self.requests.quarantine
        self.counters["recovered"] += 1
        if sequence.order in suspects:
            quarantine.record_crash(sequence)
        if quarantine.is_poison(sequence):
            text = f"the model worker crashed {quarantine.crashes(sequence)} times while it computed this request"
            self.requests.fail(sequence, RequestError(ErrorCode.FAILED, text))
            return
        self.requests.recover(sequence, story)

    def _reattach(self, stream: Stream, identity: bytes, submit: Submit) -> None:
        """Connect a stream to its client again, and replay everything that the client does not have."""
        replica = self.replicas.register(identity)
        sequence = stream.sequence
        if not stream.continues(submit):
            text = f"the stream {submit.scheduling.resume!r} answers another prompt or has other sampling values"
            self.outbox.fail(replica.number, submit.handle, RequestError(ErrorCode.INVALID, text))
            return
        self.requests.record(sequence, f"taken up again by {identity.decode(errors='replace')}")
        before = self.replicas.number_of(sequence), sequence.handle
        if self.requests.change_listener(sequence, identity, submit.handle):
            self.outbox.end(*before, Finish.CANCELLED)
        stream.orphaned_at = None
        if stream.finished == Finish.ACTIVE:
            replica.sequences[submit.handle] = sequence
        stream.replay(self.outbox, replica.number, submit.handle, submit.text)
