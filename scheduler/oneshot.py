"""The one-shot lane: texts that take one forward pass, without rows, blocks or sampling.

A request's texts are cut into batches by tokens, and a batch may hold texts of several requests. Values do not depend
on neighbours: the texts of a lost worker are computed again, and a request is complete when each of its texts has been
answered once. Admission, limits, fair shares, deadlines and the request log are those of sequences.

Runs on the scheduler's thread and never waits.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from interfaces import Batch, BatchResult, ErrorCode, Finish, PooledValues, PoolingContext, RequestError, Submit
from scheduler import placement
from scheduler.batches_in_flight import BATCH_SECONDS, MIN_BATCH_TOKENS
from scheduler.limits import Limits
from scheduler.oneshot_queue import OneShotQueue
from scheduler.oneshot_request import OneShotRequest, Piece
from scheduler.open_requests import OpenRequests
from scheduler.request_deadlines import RequestDeadlines
from scheduler.stillness import STUCK_SECONDS
from scheduler.workers import Worker

log = logging.getLogger(__name__)

# Time of a batch beside rows in decode, as long as the time of their steps is not known.
SECONDS_BESIDE_ROWS = 0.02
# Numbers in the values of one batch: 128 MiB.
MAX_VALUES = 1 << 25


class OneShotLane:
    """The open one-shot requests. `requests` has everything that they share with sequences."""

    def __init__(
        self, requests: OpenRequests, limits: Limits, incarnation: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests = requests
        self._limits = limits
        self._incarnation = incarnation
        self._clock = clock
        self._open: dict[bytes, dict[int, OneShotRequest]] = {}
        self._queue = OneShotQueue()
        self._deadlines: RequestDeadlines[OneShotRequest] = RequestDeadlines(clock)
        # Requests that came while no worker was there to compare them with.
        self._unchecked: dict[int, OneShotRequest] = {}
        # Tokens of texts in no batch, and requests without a batch yet.
        self._waiting_tokens = 0
        self._not_begun = 0
        self._last_result = clock()
        requests.counters.update(texts=0, text_tokens=0, batches=0, batch_ms=0, text_requests=0, text_queue_ms=0)

    def __iter__(self) -> Iterator[OneShotRequest]:
        return (request for handles in list(self._open.values()) for request in list(handles.values()))

    @property
    def waiting(self) -> int:
        """Number of requests of which no text was in a batch yet."""
        return self._not_begun

    @property
    def running(self) -> int:
        return sum(map(len, self._open.values())) - self._not_begun

    def handles(self, identity: bytes) -> list[int]:
        """The open requests of a replica."""
        return list(self._open.get(identity, ()))

    # Requests

    def submit(self, identity: bytes, submit: Submit, context: PoolingContext, order: int) -> None:
        """Take a request in, or refuse it with a reason."""
        requests = self._requests
        number = requests.replicas.register(identity).number
        error = self._refusal(submit, context)
        if error is not None:
            requests.counters["failed"] += 1
            requests.request_log.record(context.request_id, f"refused: {error.message}")
            requests.outbox.fail(number, submit.handle, error)
            return
        request = OneShotRequest(
            identity, number, submit.handle, order, context, self._clock(), submit.scheduling, submit.again
        )
        self._record(request, f"queued with {len(context)} texts of {len(context.tokens)} tokens to {context.task}")
        self._open.setdefault(identity, {})[submit.handle] = request
        self._deadlines.watch(request)
        requests.opened(submit.scheduling.tenant)
        self._waiting_tokens += len(context.tokens)
        self._not_begun += 1
        if not requests.workers:
            self._unchecked[request.order] = request
        self._queue.add(request)

    def cancel(self, identity: bytes, handle: int) -> None:
        """Cancel a request of a replica. An unknown handle is ignored."""
        request = self._open.get(identity, {}).get(handle)
        if request is not None:
            self._record(request, f"cancelled by its API process; {request.answered} texts were answered")
            self._requests.counters["cancelled"] += 1
            self._close(request)

    def abort(self, prefixes: Sequence[str]) -> int:
        """End the requests whose id begins with one of `prefixes`. Returns their number."""
        chosen = [request for request in self if request.context.request_id.startswith(tuple(prefixes))]
        for request in chosen:
            self._record(request, "aborted by an operator")
            self._requests.outbox.end(request.replica_number, request.handle, Finish.CANCELLED)
            self._close(request)
        self._requests.counters["aborted"] += len(chosen)
        return len(chosen)

    def expire(self) -> None:
        """Fail the requests whose time limit has passed."""
        for request, error in self._deadlines.passed():
            self._fail(request, error)

    def look_for_stuck(self) -> None:
        """Fail the requests that have waited too long while nothing was computed."""
        now = self._clock()
        for request in self:
            seconds = now - max(request.arrived, self._last_result)
            if seconds > STUCK_SECONDS:
                where = "no model worker is here" if not self._requests.workers else "the workers compute no texts"
                text = f"nothing has been computed for this request for {seconds:.0f} s: {where}"
                self._fail(request, RequestError(ErrorCode.UNAVAILABLE, text))

    def grant_grace(self) -> None:
        """Count all times from now, because nothing could be computed before: a pause, or a jump of the clock."""
        self._last_result = self._clock()

    # Workers

    def next_batches(self) -> list[tuple[int, Batch]]:
        """Build at most one batch for each worker that has room for one in flight."""
        if self._unchecked and self._requests.workers:
            self._check_waiting()
        built = []
        for index, worker in self._requests.workers.items():
            if worker.pools:
                batch = self._build(worker)
                if batch is not None:
                    built.append((index, batch))
        return built

    def result(self, worker: Worker, result: BatchResult) -> None:
        """Publish the values of a batch. ValueError if no batch in flight has this result."""
        batch, seconds = worker.batches.take(result.number)
        worker.in_flight.grant_grace()
        self._last_result = self._clock()
        counters = self._requests.counters
        counters["batches"] += 1
        _count_size(counters, "batch_texts", sum(map(len, batch.pieces)))
        _count_size(counters, "batch_tokens", batch.tokens)
        counters["batch_ms"] += round(seconds * 1e3)
        parts = [*result.parts, *[None] * (len(batch.pieces) - len(result.parts))]
        for i, piece in enumerate(batch.pieces):
            values = parts[i]
            if piece.request.ended:
                _discard(values)
                continue
            if values is None or len(values) != len(piece):
                why = result.errors.get(i, "the model worker did not answer all of its texts")
                self._fail(piece.request, RequestError(ErrorCode.FAILED, why))
                _discard(values)
                continue
            counters["texts"] += len(piece)
            counters["text_tokens"] += piece.tokens
            self._answer(piece, values)

    def lose_worker(self, worker: Worker, story: str, blamed: bool) -> None:
        """Let the texts in the batches of a lost worker wait again. If `blamed`, one of them may be the reason."""
        pieces = [piece for batch in worker.batches.batches for piece in batch.pieces if not piece.request.ended]
        worker.batches.batches.clear()
        for piece in reversed(pieces):
            request = piece.request
            if request.ended:
                continue
            request.give_back(piece)
            self._waiting_tokens += piece.tokens
            self._requests.counters["recovered"] += 1
            if blamed:
                request.record_crash(piece)
            crashes = request.poison(piece)
            if crashes is not None:
                text = f"the model worker crashed {crashes} times while it computed {_named(piece)} of this request"
                self._fail(request, RequestError(ErrorCode.FAILED, text))
                continue
            self._record(request, f"{story}; {_named(piece)} will be computed again")
            self._queue.add(request)

    # Inside

    def _build(self, worker: Worker) -> Batch | None:
        batches = worker.batches
        tasks = worker.hello.tasks
        alone = self._queue.next_is_isolated(tasks)
        batches.wants_isolation = alone
        if alone and (len(batches) or len(worker.in_flight)):
            return None
        budget = self._budget(worker)
        if not budget or self._requests.quarantine.any_isolated(worker.rows.sequences):
            batches.wants_isolation = False  # steps must go on first
            return None
        pieces = self._queue.cut(budget, tasks)
        if not pieces:
            return None
        batches.wants_isolation = False
        batch = batches.add(pieces, worker.in_flight.answered)
        for piece in pieces:
            self._begin(piece, worker, batch.number)
        parts = [piece.request.context.part(piece.first, piece.end) for piece in pieces]
        return Batch(self._incarnation, worker.hello.epoch, batch.number, parts)

    def _budget(self, worker: Worker) -> int:
        """Tokens of the next batch; 0 if the worker must not get one now.

        Beside rows in decode batches and steps take turns, and a batch gets the time that a prompt would get.
        """
        batches = worker.batches
        # A message must hold the values, where a task gives a vector for each token and shared memory has no room.
        most = min(self._limits.text_batch_tokens(worker.hello.device), MAX_VALUES // max(1, worker.hello.hidden_size))
        running = worker.rows.running
        if not running:
            return batches.budget(most, BATCH_SECONDS, MIN_BATCH_TOKENS) if batches.has_room else 0
        if len(batches) or batches.steps_before == worker.in_flight.answered:
            return 0
        return batches.budget(most, worker.prefill_budget.seconds_beside(running) or SECONDS_BESIDE_ROWS, 1)

    def _begin(self, piece: Piece, worker: Worker, number: int) -> None:
        """Count a piece as part of a batch."""
        request = piece.request
        self._waiting_tokens -= piece.tokens
        request.batches += 1
        if request.queued_us >= 0:
            return
        self._not_begun -= 1
        waited = self._clock() - request.arrived
        request.queued_us = int(waited * 1e6)
        self._requests.counters["text_requests"] += 1
        self._requests.counters["text_queue_ms"] += round(waited * 1e3)
        where = f"batch {number} of worker {worker.hello.index} (epoch {worker.hello.epoch})"
        self._record(request, f"{_named(piece)} in {where}, after {waited * 1e3:.1f} ms")

    def _answer(self, piece: Piece, values: PooledValues) -> None:
        """Publish the values of a piece, and end its request if they are the last ones."""
        request = piece.request
        request.answer(piece)
        self._requests.outbox.vectors(
            request.replica_number, request.handle, piece.first, values, max(0, request.queued_us)
        )
        if request.complete:
            seconds = self._clock() - request.arrived
            self._record(request, f"finished: {request.answered} texts in {request.batches} parts, {seconds:.3f} s")
            self._requests.counters["finished"] += 1
            self._close(request)

    def _refusal(self, submit: Submit, context: PoolingContext) -> RequestError | None:
        open_of_tenant = self._requests.open_of(submit.scheduling.tenant)
        # Requests that have begun wait, too, with the rest of their texts.
        full = self._limits.refusal(len(self._queue), self._waiting_tokens, len(context.tokens), open_of_tenant)
        if full is not None and not submit.again:
            return RequestError(ErrorCode.OVERLOADED, full)
        workers = self._requests.workers.values()
        return placement.text_misfit(context, workers, self._limits.max_model_len) if workers else None

    def _check_waiting(self) -> None:
        """Refuse the waiting requests that the workers, which are here now, can never compute."""
        unchecked = self._unchecked
        self._unchecked = {}
        workers = self._requests.workers.values()
        for request in unchecked.values():
            error = placement.text_misfit(request.context, workers, self._limits.max_model_len)
            if error is not None:
                self._fail(request, error)

    def _fail(self, request: OneShotRequest, error: RequestError) -> None:
        log.warning("request %s failed: %s", request.context.request_id, error.message)
        self._record(request, f"failed: {error.message}")
        self._requests.counters["failed"] += 1
        self._requests.outbox.fail(request.replica_number, request.handle, error)
        self._close(request)

    def _close(self, request: OneShotRequest) -> None:
        """Free everything that a request holds. What is computed of it is dropped when it comes."""
        request.ended = True
        self._waiting_tokens -= request.waiting_tokens
        self._not_begun -= request.queued_us < 0
        self._unchecked.pop(request.order, None)
        self._queue.discard(request)
        self._deadlines.forget(request)
        handles = self._open[request.replica]
        del handles[request.handle]
        if not handles:
            del self._open[request.replica]
        self._requests.closed(request.scheduling.tenant)

    def _record(self, request: OneShotRequest, text: str) -> None:
        self._requests.request_log.record(request.context.request_id, text)


def _count_size(counters: Counter[str], name: str, size: int) -> None:
    """Count a size by its power of two, and add it up: see api_server/metrics/server_facts.py."""
    counters[f"{name}<={1 << (size - 1).bit_length()}"] += 1
    counters[f"{name}<="] += size


def _discard(values: PooledValues | None) -> None:
    """Remove the segment of values that no replica will get."""
    if values is not None:
        values.discard()


def _named(piece: Piece) -> str:
    """The texts of a piece, for people."""
    return f"text {piece.first}" if len(piece) == 1 else f"texts {piece.first} to {piece.end - 1}"
