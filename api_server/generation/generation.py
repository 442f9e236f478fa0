"""Text from a `TextGenerationRequest`: the one path that every dialect's generation takes.

    generation = await generate(server, requests)     # raises RequestFailed: nothing has been sent to the client yet
    async for delta in generation: ...                 # TextDelta after TextDelta, of all choices, interleaved
    answers = await generation.collect()               # or: run to the end, then read generation.choices

Contract (for the dialects):

- `generate` takes one request or several (a batch). Choice k of request r has the flat index `sum(n of requests
  before r) + k`; `generation.choices[index]` holds its facts, which grow with the deltas and are final when
  `choice.finish` is set.
- It returns once the first delta is there, so that every error known before it has a real HTTP status. A request that
  waits longer than `SILENCE_BEFORE_HEADERS` is handed over all the same (the stream then sends keep-alives); an error
  after that is raised by the iteration and belongs into the stream.
- The iteration ends when every choice has finished. It raises RequestFailed when one failed; the others are cancelled.
- `close()` cancels what still runs, in the scheduler too. It is idempotent. `collect` and a cancelled `generate` call
  it themselves; code that iterates must call it (`EventStream` does).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from api_server import access_log
from api_server.answers.choice import Choice, Finish, TextDelta
from api_server.answers.observer import Observer, receiving
from api_server.engine import resume, scheduling
from api_server.engine.submission import Inbox, Submission
from api_server.errors import from_scheduler
from api_server.generation import preparation
from api_server.generation.output_processor import Answer
from api_server.generation.preparation import Prepared
from api_server.generation.weights import version_of
from api_server.state import ServerState
from interfaces import SchedulingOptions, TextGenerationOutput, TextGenerationRequest

SILENCE_BEFORE_HEADERS = 10.0
# Tokens per wake-up for non-streamed answers: a wake-up costs more than reading a token.
TOKENS_AT_A_TIME = 64


async def generate(
    server: ServerState, requests: TextGenerationRequest | Sequence[TextGenerationRequest]
) -> Generation:
    """Validates, tokenizes and submits; returns with the first delta at hand. Raises RequestFailed."""
    server.check_family(False)
    batch = [requests] if isinstance(requests, TextGenerationRequest) else list(requests)
    path = batch[0].request_path
    with receiving(server.observers, path):
        prepared = await preparation.prepare(server, batch)
    generation = Generation(server, prepared)
    await generation.wait_for_first()
    return generation


class Generation:
    """The running answers to one HTTP request; iterate it, or `collect` it."""

    def __init__(
        self, server: ServerState, prepared: Sequence[Prepared], part: bool = False, again: bool = False
    ) -> None:
        """A `part` of a longer answer is reported by its owner, to observers and the access log.

        `again`: an earlier part was in the queue.
        """
        self._server = server
        self._observers: Sequence[Observer] = () if part else server.observers
        self._again = again
        self._inbox = Inbox()
        self._ready: deque[TextDelta] = deque()
        self._running: dict[Submission, Answer] = {}
        self._resume = resume.current.get()
        if self._resume is not None:
            self._resume.open(sum(item.request.n for item in prepared))
        self.choices: list[Choice] = []
        if not part and (entry := access_log.current.get()) is not None:
            entry.choices.append(self.choices)
        for request_index, item in enumerate(prepared):
            thinking = server.formats.thinks(item.request, item.prompt.tokens)
            for k in range(item.request.n):
                self._start(item, request_index, k, thinking)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if not self._ready and not self._running:
            raise StopAsyncIteration
        delta = self._ready.popleft() if self._ready else await self._next()
        if self._resume is not None:
            self._resume.shown(delta.index, delta.count)
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def collect(self) -> list[Choice]:
        """Runs to the end and returns the choices."""
        if self._resume is None and not any(answer.may_end_itself for answer in self._running.values()):
            self._inbox.at_a_time = TOKENS_AT_A_TIME
        try:
            async for _ in self:
                pass
        finally:
            self.close()
        return self.choices

    def close(self) -> None:
        """Cancels what still runs. Idempotent."""
        running = self._running
        self._running = {}
        if self._resume is None or self._resume.ends:
            self._server.engine.cancel(running)
        else:
            self._server.engine.detach(running)
        for answer in running.values():
            for observer in self._observers:
                observer.abandoned(answer.choice)

    async def wait_for_first(self) -> None:
        """Waits for the first delta, or until the silence has lasted so long that the client should see headers."""
        if self._ready or not self._running:
            return
        try:
            async with asyncio.timeout(SILENCE_BEFORE_HEADERS):
                self._ready.append(await self._next())
        except TimeoutError:
            pass
        except BaseException:
            self.close()
            raise

    def _start(self, item: Prepared, request_index: int, k: int, thinking: bool) -> None:
        context = item.context(k)
        choice = Choice(
            len(self.choices),
            item.request,
            request_index,
            item.prompt.text,
            context,
            item.only_scores,
            tenant=scheduling.current.get().tenant,
            model=item.request.lora_name or self._server.model_name,
        )
        choice.submitted = time.monotonic()
        self.choices.append(choice)
        for observer in self._observers:
            observer.started(choice)
        reader = self._server.formats.reader(item.request, thinking)
        choice.answer = choice.answer if reader is None else reader.answer
        if choice.sampling.max_new_tokens == 0:
            self._ready.append(self._finished(choice, Finish("length")))
            return
        own = self._scheduling(f"{choice.index}")
        submission = self._server.engine.submit(context, self._inbox, own, self._again)
        choice.hidden = submission.hidden
        choice.versions = submission.versions
        self._running[submission] = Answer(choice, self._server, reader)

    def _scheduling(self, answer: str) -> SchedulingOptions:
        """The scheduling options of this HTTP request; a resumable stream has a name for each of its answers."""
        common = scheduling.current.get()
        return common if self._resume is None else replace(common, resume=f"{self._resume.name}#{answer}")

    async def _next(self) -> TextDelta:
        while True:
            submission, output = await self._next_output()
            answer = self._running.get(submission)
            if answer is None:
                continue  # ended by a stop string while its next token was in flight
            answer.choice.queued = submission.queued
            answer.choice.guesses = answer.guesses_with(submission.guesses)
            self._note_times(answer.choice, 0 if answer.choice.only_scores else len(output.tokens))
            delta = answer.absorb(output)
            if delta.finish is not None:
                self._drop(submission)
                self._finished(answer.choice, delta.finish)
            elif answer.reasoning_budget_reached:
                self._drop(submission)
                # What was admitted once goes on: it has no limit in the queue, and is not refused for its length.
                own = replace(self._scheduling(f"{answer.choice.index} after thinking"), queue_seconds=None)
                after = self._server.engine.submit(answer.go_on(), self._inbox, own, again=True)
                after.versions = answer.choice.versions
                answer.guesses_before = answer.choice.guesses
                self._running[after] = answer
            return delta

    def _drop(self, submission: Submission) -> None:
        """Discards a submission's remaining updates."""
        del self._running[submission]
        self._inbox.discard(submission)  # reading them would take tokens from the next owner of its context
        self._server.engine.cancel([submission])
        if self._resume is not None:
            self._resume.drop(submission)

    async def _next_output(self) -> tuple[Submission, TextGenerationOutput]:
        """The next update; a resumable stream's come token by token."""
        while True:
            taken = self._resume.take() if self._resume is not None else None
            if taken is not None:
                return taken
            found = self._inbox.taken()
            if found is None:
                await self._inbox.arrival()
                continue
            submission, update = found
            answer = self._running.get(submission)
            if answer is None:
                continue
            if update.error is not None:
                del self._running[submission]  # failed, which is not the same as abandoned
                error = from_scheduler(update.error)
                for observer in self._observers:
                    observer.choice_failed(answer.choice, error)
                self.close()
                raise error
            if update.result is None:
                continue
            if self._resume is None:
                return submission, update.result
            self._resume.put(submission, answer.choice.index, update.result)

    def _note_times(self, choice: Choice, count: int) -> None:
        if not count:
            return
        now = time.monotonic()
        since = now - (choice.last_token or choice.submitted)
        choice.last_token = now
        choice.first_token = choice.first_token or now
        for observer in self._observers:
            observer.tokens(choice, count, since)

    def _finished(self, choice: Choice, finish: Finish) -> TextDelta:
        choice.finish = finish
        if not choice.completion_tokens and not choice.versions:
            # No version made it: the one that would have.
            choice.versions.append((0, version_of(self._server)))
        self._server.retry_after.served()
        for observer in self._observers:
            observer.finished(choice)
        return TextDelta(choice.index, "", 0, [], finish)
