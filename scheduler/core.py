"""The scheduler without its sockets: requests in, steps out, step results in, news out.

Everything here runs on one thread and never waits. `loop.py` carries the messages; tests drive this class directly.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from interfaces import (
    ErrorCode,
    Finish,
    RequestError,
    Results,
    Status,
    Step,
    StepResult,
    Submit,
    Terms,
    TextContext,
    WorkerHello,
)
from interfaces.messages.hidden_states import HiddenStates
from interfaces.messages.logprob_reports import LogprobReports
from scheduler.batch import build_step
from scheduler.limits import Limits
from scheduler.outbox import Outbox
from scheduler.quarantine import Quarantine
from scheduler.replicas import NO_REPLICA, Replicas
from scheduler.request_deadlines import RequestDeadlines
from scheduler.request_log import RequestLog
from scheduler.resumable_streams import ResumableStreams, Stream
from scheduler.sequence import Sequence
from scheduler.sessions import Sessions
from scheduler.stillness import StuckDetector, misplaced
from scheduler.succession import FencedEpochs, same_supervisor
from scheduler.waiting_queue import WaitingQueue, refusal
from scheduler.workers import NewTokens, Worker

log = logging.getLogger(__name__)

_ACTIVE, _STOP, _LENGTH = np.int8(Finish.ACTIVE), np.int8(Finish.STOP), np.int8(Finish.LENGTH)


class Scheduler:
    """State of all requests and workers. `incarnation` names this scheduler process in every message."""

    def __init__(self, limits: Limits, incarnation: int) -> None:
        self.limits = limits
        self.incarnation = incarnation
        self.workers: dict[int, Worker] = {}
        self.replicas = Replicas()
        self.waiting = WaitingQueue()
        self.outbox = Outbox(incarnation)
        self.sessions = Sessions()
        self.paused = False
        self.counters: Counter[str] = Counter(preemptions=0, cancelled=0, aborted=0, failed=0, finished=0, recovered=0)
        self._order = itertools.count()
        self._quarantine = Quarantine()
        self._fenced = FencedEpochs()
        self._deadlines = RequestDeadlines()
        self.stuck_detector = StuckDetector()
        self.streams = ResumableStreams()
        self._open: Counter[str] = Counter()
        self.request_log = RequestLog()

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
        replica = self.replicas.register(identity)
        self.cancel(identity, [submit.handle])
        stream = self.streams.find(submit)
        if stream is not None and stream.has_all(submit.context):
            self._reattach(stream, identity, submit)
            return
        if stream is not None and stream.finished == Finish.ACTIVE:
            # It draws the same tokens again, with all that was told of them.
            before = stream.sequence
            self.outbox.end(self.replicas.number_of(before), before.handle, Finish.CANCELLED)
            self._forget(before)
        error = self._refusal(submit)
        if error is not None:
            self.counters["failed"] += 1
            self.request_log.record(submit.context.request_id, f"refused: {error.message}")
            self.outbox.fail(replica.number, submit.handle, error)
            return
        sequence = Sequence.of(identity, submit, next(self._order))
        sequence.checked = bool(self.workers)
        replica.sequences[submit.handle] = sequence
        again = f", {sequence.emitted} of them generated before" if sequence.emitted else ""
        self._note(sequence, f"queued with {len(sequence.tokens)} tokens{again}; {len(self.waiting)} wait before it")
        self.waiting.add(sequence)
        self._open[sequence.terms.tenant] += 1
        self._deadlines.watch(sequence)
        self.streams.add(sequence)

    def expire(self, now: float) -> None:
        """Fails the requests whose time limit has passed."""
        for sequence, error in self._deadlines.passed(now):
            self._fail(sequence, error)
        for sequence in self.streams.orphaned(now):
            self._note(sequence, "cancelled: nobody came back for its stream")
            self._forget(sequence)
            self.counters["cancelled"] += 1

    def look_for_stuck(self, now: float) -> None:
        """Takes requests back in line that are nowhere, and fails those for which nothing has come for too long."""
        everyone = self.replicas.all_sequences()
        for sequence in misplaced(everyone, self.waiting, self.workers):
            log.error("request %s was neither in line nor on a worker: it waits again", sequence.context.request_id)
            sequence.row, sequence.blocks = -1, []
            self.waiting.add(sequence)
        if self.paused:
            self.stuck_detector.grant_grace(now)
        for sequence, error in self.stuck_detector.stuck(everyone, self.workers, now):
            self._fail(sequence, error)

    def detach(self, identity: bytes, handles: list[int]) -> None:
        """Nobody listens to these requests of a replica: those that can be taken up again go on without it."""
        for handle in handles:
            sequence = self.replicas.sequence(identity, handle)
            stream = self.streams.of(sequence)
            if sequence is None or stream is None:
                self.cancel(identity, [handle])
                continue
            self._note(sequence, f"its client is gone; it goes on, from {sequence.emitted} tokens")
            stream.orphaned_at = time.monotonic()
            self._change_listener(sequence, NO_REPLICA, handle)

    def cancel(self, identity: bytes, handles: list[int]) -> None:
        """Forgets requests of a replica; unknown handles are ignored."""
        for handle in handles:
            sequence = self.replicas.sequence(identity, handle)
            if sequence is not None:
                self._note(sequence, f"cancelled by its API process, which had {sequence.emitted} tokens")
                self._forget(sequence)
                self.counters["cancelled"] += 1

    def reconcile(self, identity: bytes, handles: list[int]) -> list[int]:
        """A replica holds these requests open: others of its are let go. Returns those that are not known here."""
        known, named = self.replicas.register(identity).sequences, set(handles)
        self.detach(identity, [handle for handle in known if handle not in named])
        return [handle for handle in handles if handle not in known]

    def drop_replica(self, identity: bytes) -> int:
        """Forgets a replica and cancels its requests; how many there were."""
        replica = self.replicas.get(identity)
        if replica is None:
            return 0
        handles = list(replica.sequences)
        self.detach(identity, handles)
        self.replicas.drop(identity)
        return len(handles)

    # Workers

    def worker_hello(self, hello: WorkerHello) -> bool:
        """A worker says what it is.

        True when it is new or restarted, after its predecessor's sequences went back in line.
        """
        known = self.workers.get(hello.index)
        if known is not None and known.hello.epoch == hello.epoch:
            known.hello = hello  # some of it changes
        if (
            self.is_fenced(hello)
            or self.index_is_taken(hello)
            or (known is not None and known.hello.epoch >= hello.epoch)
        ):
            return False
        if known is not None:
            self.lose_worker(hello.index, "was followed by its next epoch")
        limits = self.limits
        worker = Worker(hello, limits.max_running, limits.prefix_cache, limits.stall_seconds)
        self.workers[hello.index] = worker
        self.request_log.record_event(f"{worker.describe()} is here")
        return True

    def is_fenced(self, hello: WorkerHello) -> bool:
        """Whether this worker was given up: others compute what it had, so it must end."""
        return self._fenced.has(hello.index, hello.epoch)

    def index_is_taken(self, hello: WorkerHello) -> bool:
        """Whether another supervisor's worker is here under this index: as long as it lives this one waits."""
        known = self.workers.get(hello.index)
        return known is not None and not same_supervisor(known.hello.epoch, hello.epoch)

    def lose_worker(self, index: int, why: str = "died", blamed: bool = True) -> str:
        """A worker is gone: its sequences wait again with the tokens their clients have, in their old order.

        What it was computing may be the reason, unless nobody is `blamed`. Returns the story in one line.
        """
        worker = self.workers.pop(index)
        self._fenced.add(index, worker.hello.epoch)
        story = f"{worker.describe()} {why}"
        suspects = {sequence.order for sequence in worker.computing()} if blamed else set()
        for row in worker.rows.occupied().tolist():
            self._recover(worker.remove(row), story, suspects)
        self.request_log.record_event(story)
        return story

    def _recover(self, sequence: Sequence, story: str, suspects: set[int]) -> None:
        self.counters["recovered"] += 1
        if sequence.order in suspects:
            self._quarantine.record_crash(sequence)
        if self._quarantine.is_poison(sequence):
            crashes = self._quarantine.crashes(sequence)
            text = f"the model worker crashed {crashes} times while it computed this request"
            self._fail(sequence, RequestError(ErrorCode.FAILED, text))
            return
        self._note(sequence, f"{story}; it will be computed again from {len(sequence.tokens)} tokens")
        self.waiting.add(sequence)

    def next_steps(self) -> list[tuple[int, Step]]:
        """Places who waits, then builds at most one step for each worker that has room for one in flight."""
        if self.paused:
            return []
        self.waiting.take_while(self._place)
        steps: list[tuple[int, Step]] = []
        for index, worker in self.workers.items():
            if worker.has_room(self.limits.steps_in_flight):
                limits = self.limits
                step = build_step(worker, self.incarnation, limits.max_batch_tokens, limits.repeats, self._preempted)
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
        new = worker.received(result)
        if new.reports is not None:
            self._report(worker, new.reports)
        if new.hidden is not None:
            self._tell_hidden(worker, new.hidden)
        if len(new.rows):
            runs = {row: (int(worker.rows.version[row]), run) for row, run in new.forced.items()}
            self._book(worker, new)
            if runs:
                self._book_forced(worker, runs)
        for row, text in new.failed.items():
            sequence = worker.rows.sequences[row]
            if sequence is not None:
                self._fail(sequence, RequestError(ErrorCode.FAILED, text))

    # News

    def take_results(self) -> list[tuple[bytes, Results]]:
        """Messages for the replicas that are still there."""
        address, taken = self.replicas.address, self.outbox.take()
        return [(identity, results) for number, results in taken if (identity := address(number, results))]

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
        everyone = self.replicas.all_sequences()
        chosen = [sequence for sequence in everyone if sequence.context.request_id.startswith(wanted)]
        for sequence in chosen:
            self._note(sequence, "aborted by an operator")
            number = self.replicas.number_of(sequence)
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
        full = self.limits.refusal(self.waiting, submit.context, self._open[submit.terms.tenant])
        if full is not None and not submit.again:
            return RequestError(ErrorCode.OVERLOADED, full)
        # While a worker is restarted requests wait, too; whether they fit is seen when it is there.
        return self._misfit(submit.context, submit.terms) if self.workers else None

    def _misfit(self, context: TextContext, terms: Terms) -> RequestError | None:
        if terms.deterministic and any(worker.hello.compiling for worker in self.workers.values()):
            text = "kernels are being compiled, and a deterministic answer needs them: ask again in a minute"
            return RequestError(ErrorCode.UNAVAILABLE, text)
        return refusal(context, self.max_model_len, self.vocab_size, self.hidden_size)

    def _place(self, sequence: Sequence) -> bool:
        """Puts a sequence on the worker with the fewest sequences that has room.

        Ends it if nothing is left to compute.
        """
        if not self.workers:
            return False
        if not sequence.checked:
            error = self._misfit(sequence.context, sequence.terms)
            if error is not None:
                self._refuse(sequence, error)
                return True
            sequence.checked = True
        limit = sequence.limit(self.max_model_len)
        if len(sequence.tokens) >= limit:
            self._end(sequence, Finish.LENGTH)
            return True
        alone = self._quarantine.is_isolated(sequence)
        number = self.replicas.number_of(sequence)
        for worker in sorted(self.workers.values(), key=lambda worker: worker.rows.running):
            if self._quarantine.any_isolated(worker.rows.sequences) or (alone and worker.rows.running):
                continue
            if worker.place(sequence, number, limit, spare=worker.rows.running):
                sequence.admitted = True
                cached = int(worker.rows.num_computed_tokens[sequence.row])
                self.waiting.charge(sequence, len(sequence.tokens) - cached)
                alone_text = ", alone: two workers crashed with it" if alone else ""
                self._note(
                    sequence,
                    f"admitted to worker {worker.hello.index} (epoch {worker.hello.epoch}), row {sequence.row}; "
                    f"{cached} of {len(sequence.tokens)} tokens were cached{alone_text}",
                )
                return True
        return False

    def _preempted(self, sequence: Sequence) -> None:
        self.counters["preemptions"] += 1
        self._note(sequence, f"preempted: its blocks were wanted; it goes on later from {len(sequence.tokens)} tokens")
        self.waiting.add(sequence)

    def _report(self, worker: Worker, reports: LogprobReports) -> None:
        """Passes log-probabilities on, under the handles of their requests."""
        table, rows = worker.rows, reports.owners
        for row, position in zip(rows.tolist(), reports.positions.tolist(), strict=True):
            sequence = table.sequences[row]
            if sequence is not None and position < sequence.prompt_len:
                sequence.next_report = max(sequence.next_report, position + 1)
        self.streams.append_reports(table, reports)
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
        table, rows = worker.rows, new.rows
        tokens = new.tokens.tolist()
        again = new.steady if new.steady is not None and new.steady.outlives(tokens) else None
        sequences = [table.sequences[row] for row in rows.tolist()] if again is None else again.sequences
        for sequence, token in zip(sequences, tokens, strict=True):
            assert sequence is not None
            sequence.context.tokens.advance_with_token(token)
            if sequence.queued_us >= 0:
                self._tell_placed(sequence, int(table.replica[sequence.row]))
        self.streams.append_logprobs(table, rows, new.logprobs)
        if worker.steady is not None:
            worker.steady.tokens -= 1
        if again is not None and again.replica is not None:
            self.outbox.tokens_for(again.replica, again.handles, new.tokens, again.active, new.logprobs)
            return
        lengths = np.array([len(sequence.tokens) for sequence in sequences if sequence is not None])
        finished = np.where(lengths >= table.limit[rows], _LENGTH, _ACTIVE)
        finished[table.hits_stop(rows, new.tokens)] = _STOP
        self.outbox.tokens(table.replica[rows], table.handle[rows], new.tokens, finished, new.logprobs)
        ended = finished != _ACTIVE
        for row, code in zip(rows[ended].tolist(), finished[ended].tolist(), strict=True):
            sequence = table.sequences[row]
            assert sequence is not None
            self._note(sequence, f"finished with {sequence.emitted} tokens")
            self._forget(sequence, code)
            self.counters["finished"] += 1

    def _book_forced(self, worker: Worker, runs: dict[int, tuple[int, NDArray[np.int32]]]) -> None:
        """Each further token of a row, and of the generation that it was for, as if it had come alone."""
        generation = worker.rows.version
        for i in range(max((len(run) for _, run in runs.values()), default=0)):
            left = [row for row, (owner, run) in runs.items() if i < len(run) and generation[row] == owner]
            if left:
                tokens = np.array([runs[row][1][i] for row in left], np.int32)
                self._book(worker, NewTokens(np.array(left, np.int32), tokens, None))

    def _tell_placed(self, sequence: Sequence, replica: int) -> None:
        parts = f"its prompt took {sequence.chunks or 1} steps"
        self._note(sequence, f"first token; it waited {sequence.queued_us / 1e3:.1f} ms for its place, and {parts}")
        self.outbox.placed(replica, sequence.handle, sequence.cached_tokens, sequence.queued_us)
        sequence.cached_tokens, sequence.queued_us = 0, -1

    def _end(self, sequence: Sequence, code: int) -> None:
        self.outbox.end(self.replicas.number_of(sequence), sequence.handle, code)
        self._close(sequence, code)
        self.counters["finished"] += 1

    def _fail(self, sequence: Sequence, error: RequestError) -> None:
        log.warning("request %s failed: %s", sequence.context.request_id, error.message)
        self._note(sequence, f"failed: {error.message}")
        self.counters["failed"] += 1
        self.outbox.fail(self.replicas.number_of(sequence), sequence.handle, error)
        self._forget(sequence, Finish.FAILED, error)

    def _refuse(self, sequence: Sequence, error: RequestError) -> None:
        """Ends a sequence that waits, while the line is being gone through."""
        self.counters["failed"] += 1
        self._note(sequence, f"refused: {error.message}")
        self.outbox.fail(self.replicas.number_of(sequence), sequence.handle, error)
        self._close(sequence, Finish.FAILED, error)

    def _note(self, sequence: Sequence, text: str) -> None:
        self.request_log.record(sequence.context.request_id, text)

    def _reattach(self, stream: Stream, identity: bytes, submit: Submit) -> None:
        """A stream's client is back, here: it is told everything from the first token that it does not have."""
        replica, sequence = self.replicas.register(identity), stream.sequence
        if not stream.continues(submit):
            text = f"the stream {submit.terms.resume!r} answers another prompt or has other sampling values"
            self.outbox.fail(replica.number, submit.handle, RequestError(ErrorCode.INVALID, text))
            return
        self._note(sequence, f"taken up again by {identity.decode(errors='replace')}")
        before = self.replicas.number_of(sequence), sequence.handle
        if self._change_listener(sequence, identity, submit.handle):
            self.outbox.end(*before, Finish.CANCELLED)
        stream.orphaned_at = None
        if stream.finished == Finish.ACTIVE:
            replica.sequences[submit.handle] = sequence
        stream.replay(self.outbox, replica.number, submit.handle, submit.context)

    def _change_listener(self, sequence: Sequence, identity: bytes, handle: int) -> bool:
        """From now on this replica hears of the sequence, under this handle; whether another one did."""
        had_listener = self.replicas.release(sequence)
        sequence.replica, sequence.handle = identity, handle
        if not sequence.waiting:
            table = self._worker_of(sequence).rows
            table.replica[sequence.row], table.handle[sequence.row] = self.replicas.number_of(sequence), handle
            table.changes += 1
        return had_listener

    def _forget(self, sequence: Sequence, code: int = Finish.CANCELLED, error: RequestError | None = None) -> None:
        """Frees all that a sequence holds, wherever it is."""
        if sequence.waiting:
            self.waiting.discard(sequence)
        else:
            self._worker_of(sequence).remove(sequence.row)
        self._close(sequence, code, error)

    def _close(self, sequence: Sequence, code: int, error: RequestError | None = None) -> None:
        self.replicas.release(sequence)
        self.streams.ended(sequence, code, error, time.monotonic())
        self._quarantine.forget(sequence)
        self._deadlines.forget(sequence)
        self.waiting.charge(sequence, sequence.emitted)
        self._open[sequence.terms.tenant] -= 1
        if not self._open[sequence.terms.tenant]:
            del self._open[sequence.terms.tenant]

    def _worker_of(self, sequence: Sequence) -> Worker:
        return next(worker for worker in self.workers.values() if worker.rows.sequences[sequence.row] is sequence)
