"""The one-shot lane: requests for texts that take one forward pass, without rows, blocks or sampling.

They are taken in or refused here, answered and ended; `oneshot_batches.py` cuts their texts into batches. Admission,
limits, fair shares, deadlines and the request log are those of sequences. A request is complete when each of its texts
has been answered once.

Runs on the scheduler's thread and never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from interfaces import ErrorCode, Finish, PooledValues, PoolingContext, RequestError, Stage, Submit
from scheduler import placement
from scheduler.adapter import Adapter
from scheduler.limits import Limits
from scheduler.oneshot_adapters import gone
from scheduler.oneshot_queue import OneShotQueue
from scheduler.oneshot_request import OneShotRequest, Piece
from scheduler.open_requests import OpenRequests
from scheduler.request_deadlines import RequestDeadlines
from scheduler.stillness import STUCK_SECONDS
from scheduler.workers import Worker


class OneShotLane:
    """The open one-shot requests. `requests` has everything that they share with sequences."""

    def __init__(
        self,
        requests: OpenRequests,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        find_adapter: Callable[[PoolingContext], Adapter | None] = lambda _: None,
    ) -> None:
        self._requests = requests
        self._limits = limits
        self._clock = clock
        self._find_adapter = find_adapter
        self._open: dict[bytes, dict[int, OneShotRequest]] = {}
        self.queue = OneShotQueue()
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
        self.record(request, f"queued with {texts} to {context.task}", Stage.QUEUED)
        self._open.setdefault(identity, {})[submit.handle] = request
        self._deadlines.watch(request)
        requests.opened(submit.scheduling.tenant)
        self._waiting_tokens += request.waiting_tokens
        self._not_begun += 1
        if not requests.workers:
            self._unchecked[request.order] = request
        self.queue.add(request)

    def cancel(self, identity: bytes, handle: int) -> None:
        """Cancel a request of a replica. An unknown handle is ignored."""
        request = self._open.get(identity, {}).get(handle)
        if request is not None:
            self.record(
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
            self.record(request, "aborted by an operator", Stage.ENDED)
            self._requests.outbox.end(request.replica_number, request.handle, Finish.CANCELLED)
            self._close(request)
        self._requests.counters["aborted"] += len(chosen)
        return len(chosen)

    def expire(self) -> None:
        """Fail the requests whose time limit has passed."""
        for request, error in self._deadlines.passed():
            self.fail(request, error)

    def look_for_stuck(self) -> None:
        """Fail the requests that have waited too long while nothing was computed."""
        now = self._clock()
        for request in self:
            seconds = now - max(request.arrived, self._last_result)
            if seconds > STUCK_SECONDS:
                where = "no model worker is here" if not self._requests.workers else "the workers compute no texts"
                text = f"nothing has been computed for this request for {seconds:.0f} s: {where}"
                self.fail(request, RequestError(ErrorCode.UNAVAILABLE, text))

    def grant_grace(self) -> None:
        """Count all times from now: a worker has answered, or none could, as in a pause or a jump of the clock."""
        self._last_result = self._clock()

    # Their texts

    def check_waiting(self) -> None:
        """Refuse the requests that came before the workers, which are here now and can never compute them."""
        workers = self._requests.workers.values()
        if not self._unchecked or not workers:
            return
        unchecked = self._unchecked
        self._unchecked = {}
        for request in unchecked.values():
            error = placement.text_misfit(request.context, workers, self._limits.max_model_len)
            if error is not None:
                self.fail(request, error)

    def begin(self, piece: Piece, worker: Worker, batch: str) -> None:
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
        self.record(request, story, Stage.COMPUTED, worker.hello.index)

    def answer(self, piece: Piece, values: PooledValues) -> None:
        """Publish the values of a piece, and end its request if they are the last ones."""
        request = piece.request
        request.answer(piece)
        self._requests.outbox.vectors(
            request.replica_number, request.handle, piece.first, values, max(0, request.queued_us)
        )
        if request.complete:
            seconds = self._clock() - request.arrived
            story = f"finished: {request.answered} {request.context.noun}s in {request.batches} parts, {seconds:.3f} s"
            self.record(request, story, Stage.ENDED)
            self._requests.counters["finished"] += 1
            self._close(request)

    def wait_again(self, piece: Piece) -> None:
        """Let the texts of a piece wait for another batch."""
        request = piece.request
        request.give_back(piece)
        self._waiting_tokens += piece.tokens

    def fail(self, request: OneShotRequest, error: RequestError) -> None:
        """End a request with an error."""
        self._requests.log_failure(request.context.request_id, request.scheduling, error)
        self.record(request, f"failed: {error.message}", Stage.ENDED)
        self._requests.counters["failed"] += 1
        self._requests.outbox.fail(request.replica_number, request.handle, error)
        self._close(request)

    def record(self, request: OneShotRequest, text: str, stage: int = Stage.NOTE, worker: int = -1) -> None:
        """Write into the story of a request."""
        name, span_id = request.context.request_id, request.scheduling.span_id
        self._requests.request_log.record(name, text, stage, request.order, worker, span_id)

    # Inside

    def _refusal(self, submit: Submit, context: PoolingContext, adapter: Adapter | None) -> RequestError | None:
        if context.adapter and adapter is None:
            return gone(context)
        open_of_tenant = self._requests.open_of(submit.scheduling.tenant)
        # Requests that have begun wait, too, with the rest of their texts.
        full = self._limits.refusal(len(self.queue), self._waiting_tokens, int(context.costs[-1]), open_of_tenant)
        if full is not None and not submit.again:
            return RequestError(ErrorCode.OVERLOADED, full)
        workers = self._requests.workers.values()
        return placement.text_misfit(context, workers, self._limits.max_model_len) if workers else None

    def _close(self, request: OneShotRequest) -> None:
        """Free everything that a request holds. What is computed of it is dropped when it comes."""
        request.ended = True
        self._waiting_tokens -= request.waiting_tokens
        self._not_begun -= request.queued_us < 0
        self._unchecked.pop(request.order, None)
        self.queue.discard(request)
        self._deadlines.forget(request)
        handles = self._open[request.replica]
        del handles[request.handle]
        if not handles:
            del self._open[request.replica]
        self._requests.closed(request.scheduling.tenant)
        if request.adapter is not None:
            self._requests.adapter_users[request.adapter.handle] -= 1
