"""Batches of texts, and passes over images, for the workers: what each computes next, and what becomes of it.

A request's texts are cut into batches by tokens, and a batch may hold texts of several requests. Values do not depend
on neighbours: the texts of a lost worker are computed again. Knows the open requests of the lane, and workers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from interfaces import (
    Batch,
    BatchResult,
    ErrorCode,
    PixelJoin,
    PixelResult,
    PixelStep,
    PoolingTask,
    RequestError,
    Stage,
)
from scheduler.batches_in_flight import BATCH_SECONDS, MIN_BATCH_TOKENS, BatchesInFlight
from scheduler.limits import Limits
from scheduler.oneshot import OneShotLane
from scheduler.oneshot_adapters import kinds_of, unusable
from scheduler.oneshot_request import Piece, discard
from scheduler.open_requests import OpenRequests
from scheduler.painting import Painting, fewest
from scheduler.workers import Worker

# Time of a batch beside rows in decode, as long as the time of their steps is not known.
SECONDS_BESIDE_ROWS = 0.02
# Numbers in the values of one batch: 128 MiB.
MAX_VALUES = 1 << 25
# What a worker computes beside its steps and other batches, one text at a time.
_BESIDE = frozenset({str(PoolingTask.ENCODE_SPEECH)})


OneShotWork = Batch | PixelStep
OneShotResult = BatchResult | PixelResult


class OneShotBatches:
    """The batches of the requests of `lane`."""

    def __init__(self, lane: OneShotLane, requests: OpenRequests, limits: Limits, incarnation: int) -> None:
        self._lane = lane
        self._requests = requests
        self._limits = limits
        self._incarnation = incarnation

    def next_batches(self) -> list[tuple[int, OneShotWork]]:
        """Build at most one batch, or pass over images, for each worker that has room for one in flight, and one that
        it computes beside them."""
        self._lane.check_waiting()
        wanted = self._lane.queue.adapters
        for request, error in unusable(self._lane, wanted, self._requests.workers.values()):
            self._lane.fail(request, error)
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
        self._lane.grant_grace()
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
                self._lane.fail(piece.request, RequestError(ErrorCode.FAILED, why))
                discard(values)
                continue
            counters["texts"] += len(piece)
            counters["text_tokens"] += piece.tokens
            self._lane.answer(piece, values)

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
            self._lane.wait_again(piece)
            self._requests.counters["recovered"] += 1
            if blamed:
                request.record_crash(piece)
            crashes = request.poison(piece)
            if crashes is not None:
                text = f"the model worker crashed {crashes} times while it computed {piece} of this request"
                self._lane.fail(request, RequestError(ErrorCode.FAILED, text))
                continue
            if request.next_is_isolated:
                # What is kept may be what crashes workers.
                request.kept.pop(piece.first, None)
            again = f"{piece} will be computed again"
            if (kept := request.kept.get(piece.first)) is not None:
                again += f", from step {kept.taken} on"
            self._lane.record(request, f"{story}; {again}", Stage.RECOVERED)
            self._lane.queue.add(request)

    # Inside

    def _build(self, worker: Worker, kinds: Collection[str]) -> Batch | None:
        batches = worker.batches
        # A text that must be alone has nothing beside it.
        kinds = [kind for kind in kinds if kind not in _BESIDE or self._lane.queue.next_is_isolated([kind])]
        alone = self._lane.queue.next_is_isolated(kinds)
        batches.wants_isolation = alone
        if alone and (len(batches) or len(worker.in_flight) or len(worker.beside)):
            return None
        budget = self._budget(worker)
        if not budget or self._requests.quarantine.any_isolated(worker.rows.sequences):
            batches.wants_isolation = False  # steps must go on first
            return None
        pieces = self._lane.queue.cut(budget, kinds)
        if not pieces:
            return None
        batches.wants_isolation = False
        return self._sent(worker, batches, pieces)

    def _build_beside(self, worker: Worker, kinds: Collection[str]) -> Batch | None:
        """Build a batch of one text that the worker computes beside all others, if it computes none so."""
        able = _BESIDE.intersection(kinds)
        if not able or len(worker.beside) or worker.batches.keeps_steps_off or self._lane.queue.next_is_isolated(able):
            return None
        quarantine = self._requests.quarantine
        # One that waits to run alone would wait for ever if clips followed each other.
        if quarantine.any_isolated(worker.rows.sequences) or quarantine.any_isolated(self._requests.waiting):
            return None
        # One text is taken, however long it is.
        pieces = self._lane.queue.cut(1, able)
        return self._sent(worker, worker.beside, pieces) if pieces else None

    def _sent(self, worker: Worker, batches: BatchesInFlight, pieces: Sequence[Piece]) -> Batch:
        """Count pieces as a batch that the worker is sent."""
        batch = batches.add(pieces, worker.in_flight.answered)
        for piece in pieces:
            self._lane.begin(piece, worker, f"batch {batch.number}")
        parts = [piece.request.context.part(piece.first, piece.end) for piece in pieces]
        return Batch(self._incarnation, worker.hello.epoch, batch.number, parts)

    def _pass_result(self, worker: Worker, result: PixelResult) -> None:
        """Publish the images that are done. ValueError if no pass in flight has this result."""
        painting = worker.painting
        if painting is None:
            raise ValueError(f"pass {result.number} over images answers nothing: worker {result.index} paints none")
        batch, seconds = worker.batches.take(result.number)
        self._lane.grant_grace()
        counters = self._requests.counters
        counters.update(pixel_passes=1, pixel_steps=len(batch.pieces), batch_ms=round(seconds * 1e3))
        for painted in painting.answered(result.number, result.passes.tolist()):
            self._lane.record(painted.piece.request, f"{painted.piece}: step {painted.passes} of {painted.total}")
        painting.keep(result)
        for piece, why in painting.failed(result):
            self._lane.fail(piece.request, RequestError(ErrorCode.FAILED, why))
        for piece, number, values in painting.previews(result):
            request = piece.request
            self._requests.outbox.preview(request.replica_number, request.handle, piece.first, values, number)
        for piece, values in painting.finished(result):
            counters["images"] += 1
            self._lane.answer(piece, values)

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
            if self._lane.queue.next_is_isolated(tasks) and (len(painting) or len(batches)):
                break
            # One image is taken, however much it weighs.
            pieces = self._lane.queue.cut(1, tasks)
            if not pieces:
                break
            joins.append(painting.join(pieces[0], worker.remote))
        if not len(painting) and not dropped:
            return None
        batch = batches.add(painting.pieces, worker.in_flight.answered)
        for piece in batch.pieces[len(batch.pieces) - len(joins) :]:
            self._lane.begin(piece, worker, f"pass {batch.number}")
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
