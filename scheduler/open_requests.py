"""The requests that have not ended: where each of them is, and everything that is freed and published when one ends."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from interfaces import FIRST_VERSION, Finish, RequestError, SchedulingOptions, Stage
from scheduler.draining import Drain
from scheduler.outbox import Outbox
from scheduler.quarantine import Quarantine
from scheduler.replicas import Replicas
from scheduler.request_deadlines import RequestDeadlines
from scheduler.request_log import RequestLog
from scheduler.resumable_streams import ResumableStreams
from scheduler.sequence import Sequence
from scheduler.waiting_queue import WaitingQueue
from scheduler.workers import Worker
from shared import logs

log = logging.getLogger(__name__)


class OpenRequests:
    """The state that all parts of the scheduler share: workers, replicas, the queue, results to send, and the log."""

    def __init__(self, incarnation: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.workers: dict[int, Worker] = {}
        self.replicas = Replicas()
        self.waiting = WaitingQueue()
        self.outbox = Outbox(incarnation)
        self.streams = ResumableStreams(clock)
        self.deadlines: RequestDeadlines[Sequence] = RequestDeadlines(clock)
        self.quarantine = Quarantine()
        self.request_log = RequestLog()
        # Tokens of workers that are here are not among them: `counted` has all.
        self.counters: Counter[str] = Counter(
            preemptions=0,
            cancelled=0,
            aborted=0,
            failed=0,
            finished=0,
            recovered=0,
            handed_over=0,
            rebalanced=0,
            shipped_tokens=0,
            adapter_loads=0,
            placed_tokens=0,
            saved_tokens=0,
        )
        self._open: Counter[str] = Counter()
        # Number of open requests by the handle of their adapter; the only count of its users.
        self.adapter_users: Counter[int] = Counter()
        # Name of the version of the weights that is served.
        self.version = FIRST_VERSION
        self.drain = Drain(clock)

    @property
    def running(self) -> int:
        return sum(worker.rows.running for worker in self.workers.values())

    @property
    def started(self) -> int:
        """Those that run, and those that ran before and wait to go on."""
        return self.running + self.waiting.returning

    def take_worker(self, index: int) -> Worker:
        """Take off a worker that is lost. What it has counted stays in the counters of all."""
        worker = self.workers.pop(index)
        self.counters["placed_tokens"] += worker.beginnings.placed_tokens
        self.counters["saved_tokens"] += worker.beginnings.saved_tokens
        return worker

    def counted(self) -> Counter[str]:
        """The counters, with what the workers that are here have counted. None ever falls."""
        counted = self.counters.copy()
        for worker in self.workers.values():
            counted["placed_tokens"] += worker.beginnings.placed_tokens
            counted["saved_tokens"] += worker.beginnings.saved_tokens
        return counted

    def open_of(self, tenant: str) -> int:
        """Number of open requests of a tenant."""
        return self._open[tenant]

    def opened(self, tenant: str) -> None:
        """Count one more open request of a tenant."""
        self._open[tenant] += 1

    def closed(self, tenant: str) -> None:
        """Count one open request of a tenant less."""
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]

    def worker_of(self, sequence: Sequence) -> Worker:
        """The worker on which a sequence runs."""
        return next(worker for worker in self.workers.values() if worker.rows.has(sequence))

    def record(self, sequence: Sequence, text: str, stage: int = Stage.NOTE, worker: int = -1) -> None:
        """Write a decision about a request into the request log; `stage` and `worker` as in `Decision`."""
        span_id = sequence.scheduling.span_id
        self.request_log.record(sequence.context.request_id, text, stage, sequence.order, worker, span_id)

    def add(self, sequence: Sequence) -> None:
        """Put a new request into the queue."""
        self.replicas.register(sequence.replica).sequences[sequence.handle] = sequence
        again = f", {sequence.emitted} of them generated before" if sequence.emitted else ""
        adapted = f", for the {sequence.adapter}" if sequence.adapter is not None else ""
        story = f"queued with {len(sequence.tokens)} tokens{again}{adapted}; {len(self.waiting)} wait before it"
        self.record(sequence, story, Stage.QUEUED)
        self.waiting.add(sequence)
        self.opened(sequence.scheduling.tenant)
        if sequence.adapter is not None:
            self.adapter_users[sequence.adapter.handle] += 1
        self.deadlines.watch(sequence)
        self.streams.add(sequence)

    def preempt(self, sequence: Sequence, why: str = "its blocks were wanted") -> None:
        """Put a sequence that has lost its row back into the queue."""
        self.counters["preemptions"] += 1
        story = f"preempted: {why}; it goes on later from {len(sequence.tokens)} tokens"
        self.record(sequence, story, Stage.PREEMPTED)
        self.waiting.add(sequence)

    def recover(self, sequence: Sequence, story: str) -> None:
        """Put a sequence whose worker is lost back into the queue. `story` says how it was lost."""
        text = f"{story}; it will be computed again from {len(sequence.tokens)} tokens"
        self.record(sequence, text, Stage.RECOVERED)
        self.waiting.add(sequence)

    def requeue_misplaced(self, sequence: Sequence) -> None:
        """Put a sequence that was lost between queue and workers back into the queue."""
        with logs.about(sequence.context.request_id, sequence.scheduling.trace_id):
            log.error("request %s was neither in line nor on a worker: it waits again", sequence.context.request_id)
        sequence.row = -1
        sequence.blocks = []
        self.waiting.add(sequence)

    def change_listener(self, sequence: Sequence, replica: bytes, handle: int) -> bool:
        """Publish a sequence to another replica. Returns whether it had a listener before."""
        had_listener = self.replicas.release(sequence)
        sequence.replica = replica
        sequence.handle = handle
        if not sequence.waiting:
            table = self.worker_of(sequence).rows
            table.replica[sequence.row] = self.replicas.number_of(sequence)
            table.handle[sequence.row] = handle
        return had_listener

    def publish_placement(self, sequence: Sequence, replica: int) -> None:
        """Publish how long a sequence waited for its row, and how much of its prompt was cached. Happens once."""
        parts = f"its prompt took {sequence.chunks or 1} steps"
        story = f"first token; it waited {sequence.queued_us / 1e3:.1f} ms for its place, and {parts}"
        self.record(sequence, story, Stage.FIRST_TOKEN)
        self.outbox.placed(replica, sequence.handle, sequence.cached_tokens, sequence.queued_us)
        sequence.cached_tokens = 0
        sequence.queued_us = -1

    def publish_version(self, sequence: Sequence, replica: int) -> None:
        """Publish which version of the weights makes the tokens from the next one on."""
        if sequence.emitted:
            self.record(sequence, f"it goes on with version {self.version!r} of the weights")
        self.outbox.version(replica, sequence.handle, sequence.emitted, self.version)
        sequence.version = self.version
        sequence.versions[sequence.emitted] = self.version

    # Ends

    def finish(self, sequence: Sequence, code: int) -> None:
        """End a sequence whose last token is published."""
        guessed, right = sequence.guesses
        parts = f"; {right} of {guessed} guesses at them were right" if guessed else ""
        self.record(sequence, f"finished with {sequence.emitted} tokens{parts}", Stage.ENDED)
        self.forget(sequence, code)
        self.counters["finished"] += 1

    def cancel(self, sequence: Sequence, why: str) -> None:
        """End a sequence without publishing it."""
        self.record(sequence, why, Stage.ENDED)
        self.forget(sequence)
        self.counters["cancelled"] += 1

    def fail(self, sequence: Sequence, error: RequestError) -> None:
        """End a sequence, wherever it is, and publish the error."""
        self.log_failure(sequence.context.request_id, sequence.scheduling, error)
        self.record(sequence, f"failed: {error.message}", Stage.ENDED)
        self.counters["failed"] += 1
        self.outbox.fail(self.replicas.number_of(sequence), sequence.handle, error)
        self.forget(sequence, Finish.FAILED, error)

    def log_failure(self, request_id: str, scheduling: SchedulingOptions, error: RequestError) -> None:
        """Write a line about a request that ends with an error."""
        with logs.about(request_id, scheduling.trace_id):
            log.warning("request %s failed: %s", request_id, error.message)

    def refuse_queued(self, sequence: Sequence, error: RequestError) -> None:
        """End a sequence that the queue is offering now, and will drop itself."""
        self.counters["failed"] += 1
        self.record(sequence, f"refused: {error.message}", Stage.ENDED)
        self.outbox.fail(self.replicas.number_of(sequence), sequence.handle, error)
        self._close(sequence, Finish.FAILED, error)

    def end_queued(self, sequence: Sequence, code: int) -> None:
        """End such a sequence because nothing is left to compute."""
        self.outbox.end(self.replicas.number_of(sequence), sequence.handle, code)
        self._close(sequence, code)
        self.counters["finished"] += 1

    def forget(self, sequence: Sequence, code: int = Finish.CANCELLED, error: RequestError | None = None) -> None:
        """Free everything that a sequence holds, wherever it is."""
        if sequence.waiting:
            self.waiting.discard(sequence)
        else:
            self.worker_of(sequence).remove(sequence.row)
        self._close(sequence, code, error)

    def _close(self, sequence: Sequence, code: int, error: RequestError | None = None) -> None:
        self.replicas.release(sequence)
        self.streams.end(sequence, code, error)
        self.quarantine.forget(sequence)
        self.deadlines.forget(sequence)
        self.waiting.charge(sequence, sequence.emitted)
        self.closed(sequence.scheduling.tenant)
        if sequence.adapter is not None:
            self.adapter_users[sequence.adapter.handle] -= 1
