"""The one-shot lane: texts that take one forward pass, without rows, blocks or sampling.

A request's texts are cut into batches by tokens, and a batch may hold texts of several requests. Values do not depend
on neighbours: the texts of a lost worker are computed again, and a request is complete when each of its texts has been
answered once. Admission, limits, fair shares, deadlines and the request log are those of sequences.

Runs on the scheduler's thread and never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from interfaces import (
    Batch,
    BatchResult,
    ErrorCode,
    Finish,
    PixelJoin,
    PixelResult,
    PixelStep,
    PooledValues,
    PoolingContext,
    PoolingTask,
    RequestError,
    Stage,
    Submit,
)
from scheduler import placement
from scheduler.adapter import Adapter
from scheduler.batches_in_flight import BATCH_SECONDS, MIN_BATCH_TOKENS, BatchesInFlight
from scheduler.limits import Limits
from scheduler.oneshot_adapters import gone, kinds_of, unusable
from scheduler.oneshot_queue import OneShotQueue
from scheduler.oneshot_request import OneShotRequest, Piece, discard
from scheduler.open_requests import OpenRequests
from scheduler.painting import Painting, fewest
from scheduler.request_deadlines import RequestDeadlines
from scheduler.stillness import STUCK_SECONDS
from scheduler.workers import Worker

# Time of a batch beside rows in decode, as long as the time of their steps is not known.
SECONDS_BESIDE_ROWS = 0.02
# Numbers in the values of one batch: 128 MiB.
MAX_VALUES = 1 << 25
# What a worker computes beside its steps and other batches, one text at a time.
_BESIDE = frozenset({str(PoolingTask.ENCODE_SPEECH)})


OneShotWork = Batch | PixelStep
OneShotResult = BatchResult | PixelResult


class OneShotLane:
    """The open one-shot requests. `requests` has everything that they share with sequences."""

    def __init__(
        self,
        requests: OpenRequests,
        limits: Limits,
        incarnation: int,
        clock: Callable[[], float] = time.monotonic,
        find_adapter: Callable[[PoolingContext], Adapter | None] = lambda _: None,
    ) -> None:
        self._requests = requests
        self._limits = limits
        self._incarnation = incarnation
        self._clock = clock
        self._find_adapter = find_adapter
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
        requests.counters.update(images=0, pixel_passes=0, pixel_steps=0)

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
        adapter = self._find_adapter(context) if context.adapter else None
        error = self._refusal(submit, context, adapter)
        if error is not None:
            requests.counters["failed"] += 1
            requests.request_log.record(context.request_id, f"refused: {error.message}")
            requests.outbox.fail(number, submit.handle, error)
            return
        request = OneShotRequest(
            identity, number, submit.handle, order, context, self._clock(), submit.scheduling, submit.again, adapter
        )
        if adapter is not None:
            context.adapter_handle = adapter.handle
            requests.adapter_users[adapter.handle] += 1
        texts = f"{len(context)} {context.noun}s of {len(context.tokens)} tokens"
        self._record(request, f"queued with {texts} to {context.task}", Stage.QUEUED)
        self._open.setdefault(identity, {})[submit.handle] = request
        self._deadlines.watch(request)
        requests.opened(submit.scheduling.tenant)
        self._waiting_tokens += request.waiting_tokens
        self._not_begun += 1
        if not requests.workers:
            self._unchecked[request.order] = request
        self._queue.add(request)

    def cancel(self, identity: bytes, handle: int) -> None:
        """Cancel a request of a replica. An unknown handle is ignored."""
        request = self._open.get(identity, {}).get(handle)
        if request is not None:
            self._record(
                request,
                f"cancelled by its API process; {request.answered} {request.context.noun}s were answered",
                Stage.ENDED,
            )
            self._requests.counters["cancelled"] += 1
            self._close(request)

    def abort(self, prefixes: Sequence[str]) -> int:
        """End the requests whose id begins with one of `prefixes`. Returns their number."""
        chosen = [request for request in self if request.context.request_id.startswith(tuple(prefixes))]
        for request in chosen:
            self._record(request, "aborted by an operator", Stage.ENDED)
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

    def next_batches(self) -> list[tuple[int, OneShotWork]]:
        """Build at most one batch, or pass over images, for each worker that has room for one in flight, and one that
        it computes beside them."""
        if self._unchecked and self._requests.workers:
            self._check_waiting()
        wanted = self._queue.adapters
        for request, error in unusable(self, wanted, self._requests.workers.values()):
            self._fail(request, error)
        built: list[tuple[int, OneShotWork]] = []
        for index, worker in self._requests.workers.items():
            if worker.pools and not worker.leaving:
                kinds = kinds_of(worker, wanted)
                painting = worker.painting
                batch = self._build(worker, kinds) if painting is None else self._build_pass(worker, painting)
                beside = self._build_beside(worker, kinds)
                built += [(index, work) for work in (batch, beside) if work is not None]
        return built

    def result(self, worker: Worker, result: OneShotResult) -> None:
        """Publish the values of a batch, or the images of a pass. ValueError if none in flight has this result."""
        if isinstance(result, PixelResult):
            self._pass_result(worker, result)
            return
        if worker.beside.has(result.number):
            batch, seconds = worker.beside.take(result.number)
        else:
            batch, seconds = worker.batches.take(result.number)
            worker.in_flight.grant_grace()
        self._last_result = self._clock()
        counters = self._requests.counters
        counters["batches"] += 1
        batch.count_in(counters)
        counters["batch_ms"] += round(seconds * 1e3)
        parts = [*result.parts, *[None] * (len(batch.pieces) - len(result.parts))]
        for i, piece in enumerate(batch.pieces):
            values = parts[i]
            if piece.request.ended:
                discard(values)
                continue
            if values is None or len(values) != len(piece):
                why = result.errors.get(i, "the model worker did not answer all of its texts")
                self._fail(piece.request, RequestError(ErrorCode.FAILED, why))
                discard(values)
                continue
            counters["texts"] += len(piece)
            counters["text_tokens"] += piece.tokens
            self._answer(piece, values)

    def lose_worker(self, worker: Worker, story: str, blamed: bool) -> None:
        """Let the texts in the batches of a lost worker wait again. If `blamed`, one of them may be the reason."""
        lanes = worker.batches.batches, worker.beside.batches
        held = [piece for batches in lanes for batch in batches for piece in batch.pieces]
        if worker.painting is not None:
            # Images stay on the worker from pass to pass.
            held = worker.painting.clear()
        pieces = [piece for piece in held if not piece.request.ended]
        for batches in lanes:
            batches.clear()
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
                text = f"the model worker crashed {crashes} times while it computed {piece} of this request"
                self._fail(request, RequestError(ErrorCode.FAILED, text))
                continue
            if request.next_is_isolated:
                # What is kept may be what crashes workers.
                request.kept.pop(piece.first, None)
            again = f"{piece} will be computed again"
            if (kept := request.kept.get(piece.first)) is not None:
                again += f", from step {kept.taken} on"
            self._record(request, f"{story}; {again}", Stage.RECOVERED)
            self._queue.add(request)

    # Inside

    def _build(self, worker: Worker, kinds: Collection[str]) -> Batch | None:
        batches = worker.batches
        # A text that must be alone has nothing beside it.
        kinds = [kind for kind in kinds if kind not in _BESIDE or self._queue.next_is_isolated([kind])]
        alone = self._queue.next_is_isolated(kinds)
        batches.wants_isolation = alone
        if alone and (len(batches) or len(worker.in_flight) or len(worker.beside)):
            return None
        budget = self._budget(worker)
        if not budget or self._requests.quarantine.any_isolated(worker.rows.sequences):
            batches.wants_isolation = False  # steps must go on first
            return None
        pieces = self._queue.cut(budget, kinds)
        if not pieces:
            return None
        batches.wants_isolation = False
        return self._sent(worker, batches, pieces)

    def _build_beside(self, worker: Worker, kinds: Collection[str]) -> Batch | None:
        """Build a batch of one text that the worker computes beside all others, if it computes none so."""
        able = _BESIDE.intersection(kinds)
        if not able or len(worker.beside) or worker.batches.keeps_steps_off or self._queue.next_is_isolated(able):
            return None
        quarantine = self._requests.quarantine
        # One that waits to run alone would wait for ever if clips followed each other.
        if quarantine.any_isolated(worker.rows.sequences) or quarantine.any_isolated(self._requests.waiting):
            return None
        # One text is taken, however long it is.
        pieces = self._queue.cut(1, able)
        return self._sent(worker, worker.beside, pieces) if pieces else None

    def _sent(self, worker: Worker, batches: BatchesInFlight, pieces: Sequence[Piece]) -> Batch:
        """Count pieces as a batch that the worker is sent."""
        batch = batches.add(pieces, worker.in_flight.answered)
        for piece in pieces:
            self._begin(piece, worker, f"batch {batch.number}")
        parts = [piece.request.context.part(piece.first, piece.end) for piece in pieces]
        return Batch(self._incarnation, worker.hello.epoch, batch.number, parts)

    def _pass_result(self, worker: Worker, result: PixelResult) -> None:
        """Publish the images that are done. ValueError if no pass in flight has this result."""
        painting = worker.painting
        if painting is None:
            raise ValueError(f"pass {result.number} over images answers nothing: worker {result.index} paints none")
        batch, seconds = worker.batches.take(result.number)
        self._last_result = self._clock()
        counters = self._requests.counters
        counters.update(pixel_passes=1, pixel_steps=len(batch.pieces), batch_ms=round(seconds * 1e3))
        for painted in painting.answered(result.number, result.passes.tolist()):
            self._record(painted.piece.request, f"{painted.piece}: step {painted.passes} of {painted.total}")
        painting.keep(result)
        for piece, why in painting.failed(result):
            self._fail(piece.request, RequestError(ErrorCode.FAILED, why))
        for piece, number, values in painting.previews(result):
            request = piece.request
            self._requests.outbox.preview(request.replica_number, request.handle, piece.first, values, number)
        for piece, values in painting.finished(result):
            counters["images"] += 1
            self._answer(piece, values)

    def _build_pass(self, worker: Worker, painting: Painting) -> PixelStep | None:
        """Build the next pass over the images of a worker: those that go on, and those that join."""
        batches = worker.batches
        if not batches.has_room:
            return None
        dropped = painting.take_dropped()
        joins: list[PixelJoin] = []
        tasks = worker.hello.tasks
        everyone = self._requests.workers.values()
        while painting.has_room and len(painting) <= fewest(other.painting for other in everyone):
            if self._queue.next_is_isolated(tasks) and (len(painting) or len(batches)):
                break
            # One image is taken, however much it weighs.
            pieces = self._queue.cut(1, tasks)
            if not pieces:
                break
            joins.append(painting.join(pieces[0], worker.remote))
        if not len(painting) and not dropped:
            return None
        batch = batches.add(painting.pieces, worker.in_flight.answered)
        for piece in batch.pieces[len(batch.pieces) - len(joins) :]:
            self._begin(piece, worker, f"pass {batch.number}")
        rows = painting.sent(batch.number, len(joins))
        drop = np.array(dropped, np.int32)
        return PixelStep(self._incarnation, worker.hello.epoch, batch.number, rows, drop, joins)

    def _budget(self, worker: Worker) -> int:
        """Tokens of the next batch; 0 if the worker must not get one now.

        Beside rows in decode batches and steps take turns, and a batch gets the time that a prompt would get.
        """
        batches = worker.batches
        # A message must hold the values, where a task gives a vector for each token and shared memory has no room.
        most = min(self._limits.text_batch_tokens(worker.hello.device), MAX_VALUES // max(1, worker.hello.hidden_size))
        running = worker.rows.running
        if not running:
            least = 1 if worker.speaks else MIN_BATCH_TOKENS
            return batches.budget(most, BATCH_SECONDS, least) if batches.has_room else 0
        if len(batches) or batches.steps_before == worker.in_flight.answered:
            return 0
        return batches.budget(most, worker.prefill_budget.seconds_beside(running) or SECONDS_BESIDE_ROWS, 1)

    def _begin(self, piece: Piece, worker: Worker, batch: str) -> None:
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
        where = f"{batch} of worker {worker.hello.index} (epoch {worker.hello.epoch})"
        story = f"{piece} in {where}, after {waited * 1e3:.1f} ms"
        self._record(request, story, Stage.COMPUTED, worker.hello.index)

    def _answer(self, piece: Piece, values: PooledValues) -> None:
        """Publish the values of a piece, and end its request if they are the last ones."""
        request = piece.request
        request.answer(piece)
        self._requests.outbox.vectors(
            request.replica_number, request.handle, piece.first, values, max(0, request.queued_us)
        )
        if request.complete:
            seconds = self._clock() - request.arrived
            story = f"finished: {request.answered} {request.context.noun}s in {request.batches} parts, {seconds:.3f} s"
            self._record(request, story, Stage.ENDED)
            self._requests.counters["finished"] += 1
            self._close(request)

    def _refusal(self, submit: Submit, context: PoolingContext, adapter: Adapter | None) -> RequestError | None:
        if context.adapter and adapter is None:
            return gone(context)
        open_of_tenant = self._requests.open_of(submit.scheduling.tenant)
        # Requests that have begun wait, too, with the rest of their texts.
        full = self._limits.refusal(len(self._queue), self._waiting_tokens, int(context.costs[-1]), open_of_tenant)
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
        self._requests.log_failure(request.context.request_id, request.scheduling, error)
        self._record(request, f"failed: {error.message}", Stage.ENDED)
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
        if request.adapter is not None:
            self._requests.adapter_users[request.adapter.handle] -= 1

    def _record(self, request: OneShotRequest, text: str, stage: int = Stage.NOTE, worker: int = -1) -> None:
        name, span_id = request.context.request_id, request.scheduling.span_id
        self._requests.request_log.record(name, text, stage, request.order, worker, span_id)
