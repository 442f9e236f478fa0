"""The scheduler without its sockets: requests in, steps out, step results in, news out.

Everything here runs on one thread and never waits. `loop.py` carries the messages; tests drive this class directly.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from interfaces import (
    ErrorCode,
    Finish,
    RequestError,
    Results,
    Status,
    Step,
    StepResult,
    Submit,
    WorkerHello,
)
from interfaces.hidden_states import HiddenStates
from interfaces.logprob_reports import LogprobReports
from scheduler.admission import WaitingLine, refusal
from scheduler.batch import build_step
from scheduler.outbox import Outbox
from scheduler.sequence import Sequence
from scheduler.sessions import Sessions
from scheduler.workers import NewTokens, Worker

log = logging.getLogger(__name__)

CRASHES_BEFORE_ALONE = 2
"""A sequence that was on a worker at so many crashes runs alone the next time, and fails if that crashes too."""

_ACTIVE, _STOP, _LENGTH = np.int8(Finish.ACTIVE), np.int8(Finish.STOP), np.int8(Finish.LENGTH)


@dataclass(frozen=True)
class Limits:
    """What the operator allows; None leaves `max_model_len` to the workers."""

    max_running: int
    max_batch_tokens: int
    max_queued: int
    max_model_len: int | None
    steps_in_flight: int
    prefix_cache: bool


@dataclass(slots=True)
class Replica:
    """An API process and its requests by handle."""

    number: int
    sequences: dict[int, Sequence] = field(default_factory=dict)


class Scheduler:
    """State of all requests and workers. `incarnation` names this scheduler process in every message."""

    def __init__(self, limits: Limits, incarnation: int) -> None:
        self.limits = limits
        self.incarnation = incarnation
        self.workers: dict[int, Worker] = {}
        self.replicas: dict[bytes, Replica] = {}
        self.waiting = WaitingLine()
        self.outbox = Outbox(incarnation)
        self.sessions = Sessions()
        self.paused = False
        self.counters: Counter[str] = Counter(preemptions=0, cancelled=0, aborted=0, failed=0, finished=0, recovered=0)
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._identity_of: dict[int, bytes] = {}
        self._crashes: Counter[int] = Counter()

    @property
    def max_model_len(self) -> int:
        """Longest sequence every live worker can hold; 0 without workers."""
        lengths = [worker.hello.max_model_len for worker in self.workers.values()]
        wanted = self.limits.max_model_len
        return min([*lengths, wanted] if wanted else lengths) if lengths else 0

    @property
    def vocab_size(self) -> int:
        return min((worker.hello.vocab_size for worker in self.workers.values()), default=0)

    @property
    def hidden_size(self) -> int:
        return min((worker.hello.hidden_size for worker in self.workers.values()), default=0)

    @property
    def running(self) -> int:
        return sum(worker.rows.running for worker in self.workers.values())

    # Requests

    def submit(self, identity: bytes, submit: Submit) -> None:
        """Takes a request in, or refuses it with a reason."""
        replica = self.replica(identity)
        self.cancel(identity, [submit.handle])
        error = self._refusal(submit)
        if error is not None:
            self.counters["failed"] += 1
            self.outbox.fail(replica.number, submit.handle, error)
            return
        sequence = Sequence.of(identity, submit, next(self._order))
        replica.sequences[submit.handle] = sequence
        self.waiting.add(sequence)

    def cancel(self, identity: bytes, handles: list[int]) -> None:
        """Forgets requests of a replica; unknown handles are ignored."""
        replica = self.replicas.get(identity)
        for handle in handles if replica else ():
            sequence = self.replica(identity).sequences.get(handle)
            if sequence is not None:
                self._forget(sequence)
                self.counters["cancelled"] += 1

    def replica(self, identity: bytes) -> Replica:
        """The replica of that identity, known from now on."""
        if identity not in self.replicas:
            number = next(self._numbers)
            self.replicas[identity] = Replica(number)
            self._identity_of[number] = identity
        return self.replicas[identity]

    def drop_replica(self, identity: bytes) -> int:
        """Forgets a replica and cancels its requests; how many there were."""
        replica = self.replicas.get(identity)
        if replica is None:
            return 0
        handles = list(replica.sequences)
        self.cancel(identity, handles)
        del self.replicas[identity], self._identity_of[replica.number]
        return len(handles)

    # Workers

    def worker_hello(self, hello: WorkerHello) -> bool:
        """A worker says what it is.

        True when it is new or restarted, after its predecessor's sequences went back in line.
        """
        known = self.workers.get(hello.index)
        if known is not None and known.hello.epoch >= hello.epoch:
            return False
        if known is not None:
            self.lose_worker(hello.index)
        self.workers[hello.index] = Worker(hello, self.limits.max_running, self.limits.prefix_cache)
        return True

    def lose_worker(self, index: int) -> None:
        """A worker is gone: its sequences wait again with the tokens their clients have, in their old order."""
        worker = self.workers.pop(index)
        for row in worker.rows.occupied().tolist():
            sequence = worker.remove(row)
            self._crashes[sequence.order] += 1
            self.counters["recovered"] += 1
            if self._crashes[sequence.order] > CRASHES_BEFORE_ALONE:
                text = f"the model worker crashed {self._crashes[sequence.order]} times while it computed this request"
                self._fail(sequence, RequestError(ErrorCode.FAILED, text))
            else:
                self.waiting.add(sequence)

    def next_steps(self) -> list[tuple[int, Step]]:
        """Places who waits, then builds at most one step for each worker that has room for one in flight."""
        if self.paused:
            return []
        self.waiting.take_while(self._place)
        steps: list[tuple[int, Step]] = []
        for index, worker in self.workers.items():
            if len(worker.in_flight) < self.limits.steps_in_flight:
                step = build_step(worker, self.incarnation, self.limits.max_batch_tokens, self._preempted)
                if step is not None:
                    steps.append((index, step))
        return steps

    def step_result(self, result: StepResult) -> None:
        """Books the tokens of a step and ends the sequences that are done.

        Results of other times and epochs are ignored.
        """
        worker = self.workers.get(result.index)
        if worker is None or result.incarnation != self.incarnation or result.epoch != worker.hello.epoch:
            return
        failed = worker.failed_rows(result, worker.in_flight[0]) if result.errors and worker.in_flight else {}
        new = worker.received(result)
        if new.reports is not None:
            self._report(worker, new.reports)
        if new.hidden is not None:
            self._tell_hidden(worker, new.hidden)
        if len(new.rows):
            self._book(worker, new)
        for row, text in failed.items():
            sequence = worker.rows.sequences[row]
            if sequence is not None:
                self._fail(sequence, RequestError(ErrorCode.FAILED, text))

    # News

    def take_results(self) -> list[tuple[bytes, Results]]:
        """Messages for the replicas that are still there."""
        news = self.outbox.take()
        return [(self._identity_of[number], results) for number, results in news if number in self._identity_of]

    def status(self) -> Status:
        workers = [worker.status() for worker in self.workers.values()]
        return Status(
            incarnation=self.incarnation,
            ready=bool(workers) and not self.paused,
            reason=self._why_not_ready(),
            workers=workers,
            waiting=len(self.waiting),
            running=self.running,
            max_model_len=self.max_model_len,
            max_running=sum(len(worker.rows.sequences) for worker in self.workers.values()),
            block_size=min((worker.block_size for worker in self.workers.values()), default=0),
            vocab_size=self.vocab_size,
            counters=dict(self.counters),
            hidden_size=self.hidden_size,
        )

    # Operators' orders

    def flush_cache(self) -> str:
        """Drops every cached prefix, or says why not."""
        if self.running or len(self.waiting):
            return f"{self.running} requests run and {len(self.waiting)} wait; flush the cache when all have ended"
        for worker in self.workers.values():
            worker.pool.forget_cached()
        return ""

    def abort(self, prefixes: list[str]) -> int:
        """Ends the requests, of all replicas, whose id begins with one of these; how many there were.

        Their clients get what there is.
        """
        wanted = tuple(prefixes)
        everyone = [sequence for replica in self.replicas.values() for sequence in replica.sequences.values()]
        chosen = [sequence for sequence in everyone if sequence.context.request_id.startswith(wanted)]
        for sequence in chosen:
            number = self.replicas[sequence.replica].number
            if sequence.queued_us >= 0:
                self._tell_placed(sequence, number)
            self.outbox.end(number, sequence.handle, Finish.CANCELLED)
            self._forget(sequence)
        self.counters["aborted"] += len(chosen)
        return len(chosen)

    def retract(self) -> int:
        """Sends the running requests back in line; how many there were. They keep tokens and lose blocks."""
        running = [(worker, row) for worker in self.workers.values() for row in worker.rows.occupied().tolist()]
        for worker, row in running:
            sequence = worker.remove(row)
            sequence.preemptions += 1
            self._preempted(sequence)
        return len(running)

    # Inside

    def _why_not_ready(self) -> str:
        if not self.workers:
            return "no model worker is ready yet"
        return "generation is paused; POST /continue_generation resumes it" if self.paused else ""

    def _refusal(self, submit: Submit) -> RequestError | None:
        if len(self.waiting) >= self.limits.max_queued:
            return RequestError(
                ErrorCode.OVERLOADED, f"{len(self.waiting)} requests wait already; retry when some have finished"
            )
        if not self.workers:
            return RequestError(ErrorCode.UNAVAILABLE, "no model worker is ready; retry in a few seconds")
        return refusal(submit, self.max_model_len, self.vocab_size, self.hidden_size)

    def _place(self, sequence: Sequence) -> bool:
        """Puts a sequence on the worker with the fewest sequences that has room.

        Ends it if nothing is left to compute.
        """
        limit = sequence.limit(self.max_model_len)
        if self.workers and len(sequence.tokens) >= limit:
            self._end(sequence, Finish.LENGTH)
            return True
        alone = self._crashes[sequence.order] >= CRASHES_BEFORE_ALONE
        number = self.replicas[sequence.replica].number
        for worker in sorted(self.workers.values(), key=lambda worker: worker.rows.running):
            if self._suspect_runs(worker) or (alone and worker.rows.running):
                continue
            if worker.place(sequence, number, limit, spare=worker.rows.running):
                return True
        return False

    def _suspect_runs(self, worker: Worker) -> bool:
        if not self._crashes:
            return False
        return any(s is not None and self._crashes[s.order] >= CRASHES_BEFORE_ALONE for s in worker.rows.sequences)

    def _preempted(self, sequence: Sequence) -> None:
        self.counters["preemptions"] += 1
        self.waiting.add(sequence)

    def _report(self, worker: Worker, reports: LogprobReports) -> None:
        """Passes log-probabilities on, under the handles of their requests."""
        table, rows = worker.rows, reports.owners
        for row, position in zip(rows.tolist(), reports.positions.tolist(), strict=True):
            sequence = table.sequences[row]
            if sequence is not None and position < sequence.prompt_len:
                sequence.next_report = max(sequence.next_report, position + 1)
        self.outbox.reports(table.replica[rows], replace(reports, owners=table.handle[rows]))

    def _tell_hidden(self, worker: Worker, hidden: HiddenStates) -> None:
        """Passes hidden states on, under the handles of their requests."""
        table, rows = worker.rows, hidden.owners
        for row, position in zip(rows.tolist(), hidden.positions.tolist(), strict=True):
            sequence = table.sequences[row]
            if sequence is not None:
                sequence.next_hidden = max(sequence.next_hidden, position + 1)
        self.outbox.hidden(table.replica[rows], hidden.owned_by(table.handle[rows]))

    def _book(self, worker: Worker, new: NewTokens) -> None:
        table, rows, tokens = worker.rows, new.rows, new.tokens
        sequences = table.sequences
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            sequence = sequences[row]
            assert sequence is not None
            sequence.context.tokens.advance_with_token(token)
            if sequence.queued_us >= 0:
                self._tell_placed(sequence, int(table.replica[row]))
        length = table.length[rows] + 1
        table.length[rows] = length
        finished = np.where(length >= table.limit[rows], _LENGTH, _ACTIVE)
        finished[table.hits_stop(rows, tokens)] = _STOP
        self.outbox.tokens(table.replica[rows], table.handle[rows], tokens, finished, new.logprobs)
        for row in rows[finished != _ACTIVE].tolist():
            sequence = sequences[row]
            assert sequence is not None
            self._forget(sequence)
            self.counters["finished"] += 1

    def _tell_placed(self, sequence: Sequence, replica: int) -> None:
        self.outbox.placed(replica, sequence.handle, sequence.cached_tokens, sequence.queued_us)
        sequence.cached_tokens, sequence.queued_us = 0, -1

    def _end(self, sequence: Sequence, code: int) -> None:
        self.outbox.end(self.replicas[sequence.replica].number, sequence.handle, code)
        self._close(sequence)
        self.counters["finished"] += 1

    def _fail(self, sequence: Sequence, error: RequestError) -> None:
        log.warning("request %s failed: %s", sequence.context.request_id, error.message)
        self.counters["failed"] += 1
        self.outbox.fail(self.replicas[sequence.replica].number, sequence.handle, error)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Frees all that a sequence holds, wherever it is."""
        if sequence.waiting:
            self.waiting.discard(sequence)
        else:
            self._worker_of(sequence).remove(sequence.row)
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        self.replicas[sequence.replica].sequences.pop(sequence.handle, None)
        self._crashes.pop(sequence.order, None)

    def _worker_of(self, sequence: Sequence) -> Worker:
        return next(worker for worker in self.workers.values() if worker.rows.sequences[sequence.row] is sequence)
