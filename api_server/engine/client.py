"""The replica's end of the wire to the scheduler: submits, cancels, and hands out new tokens.

Knows handles, heartbeats and what to do when the scheduler does not know a request, because it restarted, gave this
replica up or lost a message: submit again, with the tokens received so far. It does not know text, dialects or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import zmq

from api_server.engine.fan_out import fan_out, fit_together
from api_server.engine.health import STALL_SECONDS, Health, judge, steps
from api_server.engine.model_facts import ModelFacts
from api_server.engine.open_request import OpenRequest, too_large
from api_server.engine.pooling import PooledSubmission, StreamedSubmission, wrong_task
from api_server.engine.questions import Answer, Questions, status_after
from api_server.engine.submission import Inbox, Submission
from interfaces import (
    GENERATE,
    REGISTRATION_SIZE,
    Cancel,
    Detach,
    ErrorCode,
    Goodbye,
    Hello,
    InquiryAnswer,
    PooledValues,
    PoolingContext,
    RequestError,
    Results,
    SchedulingOptions,
    Segments,
    Status,
    TextContext,
    Unknown,
    Vectors,
    WireError,
    decode,
    encode,
)
from shared.sockets import MAX_MESSAGE_BYTES, connect_dealer, frames_of, readable, same_host

log = logging.getLogger("tokenyard")

HELLO_SECONDS = 1.0
# Without a Status for this long, ten heartbeats, the scheduler counts as gone.
STALE_SECONDS = 5.0
# After this silence open requests fail. A supervisor restarts a dead scheduler within seconds.
GIVE_UP_SECONDS = 60.0
# A heartbeat this late means that this process was stopped or the whole machine was suspended.
STANDSTILL_SECONDS = 5.0
# A request that is lost this many times in a row fails: something about it cannot be sent.
MOST_LOSSES = 5
# Tokens this recent prove that the engine works.
RECENT_SECONDS = 5.0
# Most messages handled before other callbacks of the event loop run.
_BURST = 64


class EngineClient:
    """This process's client of the scheduler. Everything runs on the event loop's thread; nothing blocks."""

    def __init__(self, endpoint: str, replica: str) -> None:
        self.replica = f"{replica}-{secrets.token_hex(6)}"
        self.status: Status | None = None
        self.model = ModelFacts()
        # True while this server is being stopped: it is not ready, and still serves what arrives.
        self.draining = False
        self._ended = ""
        self._endpoint = endpoint
        self._context: zmq.Context[Any] = zmq.Context()
        self._open: dict[int, OpenRequest] = {}
        self.segments = Segments() if same_host(endpoint) else None
        self._last_handle = secrets.randbits(20)
        self._incarnation: int | None = None
        self._past: set[int] = set()
        self._last_results = -1
        self._heard = self._last_beat = time.monotonic()
        self._moved = -math.inf
        self._was_ready = False
        self._hello: asyncio.TimerHandle | None = None
        self.questions = Questions(self._send)

    def start(self) -> None:
        """Connects; the first Status arrives once the scheduler has seen the Hello."""
        self._loop = asyncio.get_running_loop()
        self._socket = connect_dealer(self._context, self._endpoint, self.replica.encode())
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._beat()

    def close(self) -> None:
        """Sends a goodbye, so that the scheduler frees this replica's requests at once. Idempotent."""
        if self._context.closed:
            return
        self._send(Goodbye(self.replica))
        self._loop.remove_reader(self._socket.fileno())
        if self._hello is not None:
            self._hello.cancel()
        self._socket.close(linger=500)
        self._context.term()
        if self.segments is not None:
            self.segments.release_all()

    @property
    def running(self) -> int:
        """The number of this replica's requests that the scheduler holds."""
        return len(self._open)

    @property
    def silence(self) -> float:
        """Seconds since the last message of the scheduler.

        0 when this process has just stood still, and not beaten yet: messages may wait, and the scheduler may have
        given this replica up."""
        now = time.monotonic()
        return 0.0 if now - self._last_beat > STANDSTILL_SECONDS else now - self._heard

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt and answer in tokens. None until a worker has reported it; kept while a worker restarts."""
        return self.model.max_model_len or None

    @property
    def hidden_size(self) -> int | None:
        """Width of the embedding vectors that may stand for tokens."""
        return self.status.hidden_size or None if self.status else None

    def health(self) -> Health:
        """The engine's health, as `health.judge` has it; a server that is being stopped is not ready.

        It is alive if it was ready once: one that gives up, since its model is refused, never was.
        """
        if self.draining:
            return Health(self._was_ready, False, "draining: this server is being stopped")
        return judge(self.status, self.silence, STALE_SECONDS, self._was_ready)

    def submit(
        self,
        context: TextContext,
        inbox: Inbox | None = None,
        scheduling: SchedulingOptions | None = None,
        again: bool = False,
    ) -> Submission:
        """Sends a request; its updates come to `inbox`. A refusal comes as a result with an `error`.

        `again`: it goes on with one that was in the queue before.
        """
        submission = Submission(self._new_handle(), context, inbox or Inbox(), scheduling or SchedulingOptions())
        submission.again = again
        self._submit(submission, GENERATE)
        return submission

    async def pool(
        self, context: PoolingContext, scheduling: SchedulingOptions | None = None, again: bool = False
    ) -> PooledValues:
        """Sends texts, `again` those of a request that was in the queue before; returns their values in order.
        Cancelling the call cancels it there. Raises RequestFailed."""
        submission = PooledSubmission(self._new_handle(), context, scheduling or SchedulingOptions(), again)
        self._submit(submission, context.task)
        try:
            return await submission.done
        finally:
            self.cancel([submission])

    def stream(
        self, context: PoolingContext, scheduling: SchedulingOptions | None = None, again: bool = False
    ) -> StreamedSubmission:
        """Sends texts whose values are handed out one after another, until `cancel`. A refusal comes with the first.

        `again`: they belong to a request that was in the queue before.
        """
        submission = StreamedSubmission(self._new_handle(), context, scheduling or SchedulingOptions(), again)
        self._submit(submission, context.task)
        return submission

    def _submit(self, submission: OpenRequest, task: str) -> None:
        reason = self._cannot_serve()
        error = RequestError(ErrorCode.UNAVAILABLE, reason) if reason else wrong_task(task, self.model.tasks)
        if error is not None:
            submission.fail(error)
            return
        if self.segments is not None:
            submission.share(self.segments)
        self._send_submit(submission)

    def end_all_in(self, seconds: float) -> None:
        """Ends requests that still run after `seconds` with an error, and all that are submitted later."""
        passed = f", and {seconds:g} s have passed" if seconds else ""
        self._loop.call_later(seconds, self._end_all, f"the server is being stopped{passed}")

    def _end_all(self, reason: str) -> None:
        self._ended = reason
        self._fail_all(reason)

    def cancel(self, submissions: Iterable[OpenRequest]) -> None:
        """Cancels requests whose client left. Idempotent; finished ones are skipped."""
        self._drop(submissions, Cancel)

    def detach(self, submissions: Iterable[OpenRequest]) -> None:
        """Detaches requests whose client left. Resumable ones keep running."""
        self._drop(submissions, Detach)

    def _drop(self, submissions: Iterable[OpenRequest], message: type[Cancel] | type[Detach]) -> None:
        handles = [s.handle for s in submissions if self._forget(s)]
        if handles:
            self._send(message(np.array(handles, np.int32)))

    @property
    def moves(self) -> bool:
        """True when the engine has computed something in the last seconds, or is computing."""
        workers = self.status.workers if self.status else ()
        computing = any(0 < worker.seconds_since_step < STALL_SECONDS for worker in workers)
        return self.silence <= STALE_SECONDS and (computing or time.monotonic() - self._moved < RECENT_SECONDS)

    def _cannot_serve(self) -> str:
        if self._ended:
            return self._ended
        if self.silence > STALE_SECONDS:
            self._receive()  # this process may have been busy, with messages waiting in the socket
        if self.status is None or self.silence > STALE_SECONDS:
            return self.health().reason
        if not self.status.ready and self.max_model_len is None:
            return f"the model is not loaded yet: {self.status.reason}"
        return ""

    def _send_submit(self, submission: OpenRequest) -> None:
        self._open[submission.handle] = submission
        data = encode(submission.message)
        if len(data) > MAX_MESSAGE_BYTES:
            error = too_large(len(data), MAX_MESSAGE_BYTES)
        elif not self._send_bytes(data):
            error = RequestError(ErrorCode.UNAVAILABLE, "the scheduler does not read its messages")
        else:
            return
        self._forget(submission)
        submission.fail(error)

    def _forget(self, submission: OpenRequest) -> bool:
        """Frees the shared memory of a submission that has ended. False when that was done before."""
        if self._open.pop(submission.handle, None) is None:
            return False
        if self.segments is not None:
            submission.unshare(self.segments)
        return True

    def _new_handle(self) -> int:
        # The wire's handles are int32; one that is still in flight is never given again.
        while True:
            self._last_handle = self._last_handle % 0x7FFFFFFF + 1
            if self._last_handle not in self._open:
                return self._last_handle

    def _beat(self) -> None:
        self._hello = self._loop.call_later(HELLO_SECONDS, self._beat)
        self.say_hello()
        now = time.monotonic()
        if now - self._last_beat > STANDSTILL_SECONDS:
            log.warning("this process stood still for %.1f s", now - self._last_beat)
            self._heard = now  # the scheduler may have stood still, too: its time starts anew
        self._last_beat = now
        if self._open and self.silence > GIVE_UP_SECONDS:
            self._fail_all(f"the scheduler has been silent for {self.silence:.0f} s")

    def say_hello(self) -> None:
        """Registers this replica with the scheduler, and names the requests it waits for."""
        self._send(Hello(self.replica, np.array(list(self._open), np.int32)))

    def _fail_all(self, reason: str) -> None:
        submissions = list(self._open.values())
        self.cancel(submissions)
        for submission in submissions:
            submission.fail(RequestError(ErrorCode.UNAVAILABLE, reason))

    def _send(self, message: Any) -> bool:
        return self._send_bytes(encode(message))

    def _send_bytes(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # A send may swallow the edge that would have announced incoming messages.
        if readable(self._socket):
            self._loop.call_soon(self._receive)
        return True

    def _receive(self) -> None:
        """Drains the socket: its file descriptor only signals edges."""
        if self._socket.closed:
            return
        for _ in range(_BURST):
            if not readable(self._socket):
                return
            for data in frames_of(self._socket):
                try:
                    self._handle(decode(data, ipc_peer=self.segments is not None))
                except WireError as error:
                    log.error("dropped a malformed message of the scheduler: %s", error)
        self._loop.call_soon(self._receive)

    def _handle(self, message: Any) -> None:
        if not isinstance(message, Results | Vectors | Unknown | Status | Answer | InquiryAnswer):
            log.error("dropped a %s: the scheduler does not send it to API processes", type(message).__name__)
            return
        if not self._is_current(message.incarnation):
            return
        self._heard = time.monotonic()
        if isinstance(message, Results):
            self._take_results(message)
        elif isinstance(message, Vectors):
            self._take_vectors(message)
        elif isinstance(message, Unknown):
            self._submit_unknown(message)
        elif isinstance(message, InquiryAnswer):
            self.questions.inquiry_answered(message)
        elif isinstance(message, Answer):
            self.status = status_after(self.status, message)
            self.questions.answered(message)
        else:
            if self.status is not None and steps(message) > steps(self.status):
                self._moved = self._heard
            self.status = message
            self.model.update(message)
            self._was_ready |= message.ready

    def _is_current(self, incarnation: int) -> bool:
        if incarnation == self._incarnation:
            return True
        if incarnation in self._past:
            return False
        if self._incarnation is not None:
            self._past.add(self._incarnation)
            self.questions.give_up("the scheduler restarted before it answered: ask again")
            self._submit_again(list(self._open.values()), "the scheduler restarted", blamed=False)
        self._incarnation = incarnation
        self._last_results = -1
        return True

    def _submit_unknown(self, message: Unknown) -> None:
        """Submits the open requests that the scheduler does not have; ended ones are skipped."""
        lost = [self._open[handle] for handle in message.handles.tolist() if handle in self._open]
        why = "the scheduler had given this process up" if message.dropped else "the scheduler does not know them"
        self._submit_again(lost, why, blamed=not message.dropped)

    def _submit_again(self, orphans: Sequence[OpenRequest], why: str, blamed: bool) -> None:
        """Submits these requests again, with the tokens that their clients have.

        They get new handles and the old ones are cancelled: a Submit that was sent before the scheduler died may
        still be queued, and results of the old handles may still come. Losses for which the requests may be `blamed`
        are counted.
        """
        if not orphans:
            return
        log.warning("%s: submitting %d open requests again", why, len(orphans))
        self._send(Cancel(np.array([orphan.handle for orphan in orphans], np.int32)))
        for orphan in orphans:
            if blamed and orphan.lost_again() >= MOST_LOSSES:
                self._give_up(orphan)
                continue
            del self._open[orphan.handle]
            orphan.handle = self._new_handle()
            orphan.again = True
            self._send_submit(orphan)

    def _give_up(self, submission: OpenRequest) -> None:
        reason = f"the scheduler has lost this request {MOST_LOSSES} times in a row"
        submission.log_failure(reason)
        self._forget(submission)
        submission.fail(RequestError(ErrorCode.FAILED, reason))

    def _take_results(self, results: Results) -> None:
        """Hands out results. After a gap, results that were lost or make no sense, later ones are ignored."""
        if not fit_together(results):
            log.error("dropped results whose parts do not fit together")
            return
        self._notice_losses(results.number)
        if fan_out(results, self._open, self._forget):
            self._moved = self._heard

    def _take_vectors(self, vectors: Vectors) -> None:
        """Hands out the values of texts."""
        self._notice_losses(vectors.number)
        self._moved = self._heard
        submission = self._open.get(vectors.handle)
        if not isinstance(submission, PooledSubmission):
            vectors.values.discard()  # cancelled here while its values were in flight
            return
        try:
            if submission.receive(vectors):
                self._forget(submission)
                submission.finish()
        except ValueError as error:
            self._submit_again([submission], str(error), blamed=True)

    def _notice_losses(self, number: int) -> None:
        if number != self._last_results + 1 and number % REGISTRATION_SIZE:
            self._submit_again(list(self._open.values()), "results were lost on their way", blamed=True)
        self._last_results = number
