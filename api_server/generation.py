"""From a `TextGenerationRequest` to text: the one path that every dialect's generation takes.

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
- `close()` cancels whatever still runs, in the scheduler too. It is idempotent, and `collect` and a cancelled
  `generate` call it themselves; whoever iterates must call it (`EventStream` does).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from api_server import preparation, resume, terms
from api_server.answer_reader import AnswerReader
from api_server.errors import ErrorKind, RequestFailed, from_scheduler
from api_server.parsers.answer import ParsedAnswer, text_of
from api_server.parsers.scanner import Piece
from api_server.preparation import Prepared
from api_server.state import ServerState
from api_server.stop_patterns import StopPatterns
from api_server.stop_strings import StopStrings
from api_server.submission import Inbox, Submission
from interfaces.log_probabilities import LogProbabilities
from interfaces.messages import Terms
from interfaces.outputs import TextGenerationOutput
from interfaces.requests import TextGenerationRequest
from interfaces.sampling import SamplingParams
from interfaces.status import GenerationStatus
from interfaces.text_context import TextContext
from interfaces.tokens import TokenSlice

# Looking up a member in an enum costs more than comparing with it.
_GOES_ON = GenerationStatus.ACTIVE

SILENCE_BEFORE_HEADERS = 10.0


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. `matched` is the stop token's id, the stop string or the stop pattern; else None."""

    kind: Literal["stop_token", "stop_string", "length", "cancelled"]
    matched: int | str | None = None


def complete(finish: Finish | None) -> Finish:
    """The end of an answer that is whole. One that the server itself cut off is none: raises RequestFailed."""
    if finish is None or finish.kind == "cancelled":
        reason = "the server ended this request before its answer was complete"
        raise RequestFailed(ErrorKind.UNAVAILABLE, reason, counted=True)
    return finish


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One generated token. `text` is what this token added to the text, special tokens included.

    `logprob` is None unless `sampling.logprobs` asked for it. `top` maps the most probable tokens to their logprobs,
    most probable first, and `asked` those that the request named.
    """

    id: int
    text: str
    logprob: float | None
    special: bool
    top: Mapping[int, float]
    asked: Mapping[int, float]


@dataclass(slots=True)  # one is made for each token, and frozen ones take three times as long to make
class TextDelta:
    """News of choice `index`: `text` to append (stop strings cut, never part of a character), perhaps empty.

    `tokens` is empty unless `token_details` was asked for; `count` tokens arrived with this delta in any case. Tokens
    whose text is still held back (an unfinished character, a possible stop string) are in the delta in which they
    arrived. `finish` is set in the last delta of a choice, and in no other. `pieces` are empty unless `parse_answer`
    was asked for; then they are all that is new, in order, and `text` is the plain text among them.
    """

    index: int
    text: str
    count: int
    tokens: list[TokenDelta]
    finish: Finish | None
    pieces: Sequence[Piece] = ()


@dataclass
class Choice:
    """One answer to one prompt: the facts of which every dialect renders its frames. Times are `time.monotonic()`."""

    index: int
    request: TextGenerationRequest
    request_index: int
    """Position of `request` in the batch."""
    prompt_text: str | None
    """The prompt as text (after the chat template, before truncation); None when it came as token ids."""
    context: TextContext
    only_scores: bool = False
    """Nothing is generated: the log-probabilities of the prompt are what is wanted."""

    completion_tokens: int = 0
    """Generated so far, with the stop token, up to the token that completed a stop string; more may have arrived."""
    tokens: list[TokenDelta] = field(default_factory=list)
    """Details of these tokens, when `token_details` was asked for."""
    pieces: list[str] = field(default_factory=list)
    answer: ParsedAnswer = field(default_factory=ParsedAnswer)
    """Reasoning, text and calls in order, when `parse_answer` was asked for."""
    reasoning_tokens: int = 0
    """Among the `completion_tokens`, as far as the model's reasoning is known and the answer is parsed."""
    hidden: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    """Hidden states by the index of their token, prompt first, when they were asked for."""
    cached_tokens: int = 0
    logprob_sum: float = 0.0
    finish: Finish | None = None

    submitted: float = 0.0
    queued: float | None = None
    """Seconds that it waited for its place on a worker; None if it never got one."""
    first_token: float | None = None
    last_token: float | None = None

    @property
    def text(self) -> str:
        """The text of all deltas so far."""
        return "".join(self.pieces)

    @property
    def prompt_tokens(self) -> int:
        return self.context.prompt_length

    @property
    def prompt_token_ids(self) -> TokenSlice:
        return self.context.tokens.prompt

    @property
    def token_ids(self) -> list[int]:
        """The `completion_tokens` generated ones."""
        ids: list[int] = self.context.tokens.generated[: self.completion_tokens].tolist()
        return ids

    @property
    def limit(self) -> int | None:
        """The most tokens that could be generated."""
        return 0 if self.only_scores else self.sampling.max_new_tokens

    @property
    def mean_logprob(self) -> float:
        """By which the best of several answers is chosen."""
        return self.logprob_sum / max(1, self.completion_tokens)

    @property
    def prompt_logprobs(self) -> LogProbabilities:
        """Of the prompt's tokens from `first_prompt_logprob` on; complete with the first delta."""
        return self.context.progress.prompt_log_probabilities

    @property
    def first_prompt_logprob(self) -> int:
        """Index of the first token of the prompt that has one: nothing comes before token 0."""
        return max(1, self.sampling.prompt_logprobs_from or 0)

    @property
    def sampling(self) -> SamplingParams:
        """The values in force: `max_new_tokens` is the limit and `seed` the seed that is used."""
        return self.context.sampling_params


async def generate(
    server: ServerState, requests: TextGenerationRequest | Sequence[TextGenerationRequest]
) -> Generation:
    """Validates, tokenizes and submits; returns with the first delta at hand. Raises RequestFailed."""
    batch = [requests] if isinstance(requests, TextGenerationRequest) else list(requests)
    path = batch[0].request_path
    for observer in server.observers:
        observer.received(path)
    generation = Generation(server, await preparation.prepare(server, batch))
    await generation.wait_for_first()
    return generation


class Generation:
    """The running answers to one HTTP request; iterate it, or `collect` it."""

    def __init__(self, server: ServerState, prepared: Sequence[Prepared]) -> None:
        self._server = server
        self._inbox = Inbox()
        self._ready: deque[TextDelta] = deque()
        self._running: dict[Submission, _Answer] = {}
        self._resume = resume.current.get()
        if self._resume is not None:
            self._resume.open(sum(item.request.n for item in prepared))
        self.choices: list[Choice] = []
        for request_index, item in enumerate(prepared):
            for k in range(item.request.n):
                self._start(item, request_index, k)

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
        try:
            async for _ in self:
                pass
        finally:
            self.close()
        return self.choices

    def close(self) -> None:
        """Cancels what still runs. Idempotent."""
        running, self._running = self._running, {}
        if self._resume is None:
            self._server.engine.cancel(running)
        else:
            self._server.engine.detach(running)
        for answer in running.values():
            for observer in self._server.observers:
                observer.abandoned(answer.choice)

    async def wait_for_first(self) -> None:
        """Until the first delta is at hand, or silence has lasted so long that the client should see headers."""
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

    def _start(self, item: Prepared, request_index: int, k: int) -> None:
        context = item.context(k)
        choice = Choice(len(self.choices), item.request, request_index, item.prompt.text, context, item.only_scores)
        choice.submitted = time.monotonic()
        self.choices.append(choice)
        for observer in self._server.observers:
            observer.started(choice)
        reader = self._server.formats.reader(item.request, choice.prompt_token_ids.tolist())
        choice.answer = choice.answer if reader is None else reader.answer
        if choice.sampling.max_new_tokens == 0:
            self._ready.append(self._finished(choice, Finish("length")))
            return
        submission = self._server.engine.submit(context, self._inbox, self._terms(f"{choice.index}"))
        choice.hidden = submission.hidden
        self._running[submission] = _Answer(choice, self._server, reader)

    def _terms(self, answer: str) -> Terms:
        """Of this HTTP request; a resumable stream has a name for each of its answers."""
        common = terms.current.get()
        return common if self._resume is None else replace(common, resume=f"{self._resume.name}#{answer}")

    async def _next(self) -> TextDelta:
        while True:
            submission, output = await self._next_output()
            answer = self._running.get(submission)
            if answer is None:
                continue  # ended by a stop string while its next token was on the way
            answer.choice.queued = submission.queued
            self._note_times(answer.choice, 0 if answer.choice.only_scores else len(output.tokens))
            delta = answer.absorb(output)
            if delta.finish is not None:
                self._drop(submission)
                self._finished(answer.choice, delta.finish)
            elif answer.has_thought_enough:
                self._drop(submission)
                own = self._terms(f"{answer.choice.index} after thinking")
                self._running[self._server.engine.submit(answer.go_on(), self._inbox, own)] = answer
            return delta

    def _drop(self, submission: Submission) -> None:
        """Nothing more of this submission is wanted."""
        del self._running[submission]
        self._server.engine.cancel([submission])
        if self._resume is not None:
            self._resume.drop(submission)

    async def _next_output(self) -> tuple[Submission, TextGenerationOutput]:
        """News as they come; a resumable stream's token by token."""
        while True:
            taken = self._resume.take() if self._resume is not None else None
            if taken is not None:
                return taken
            found = self._inbox.taken()
            if found is None:
                await self._inbox.arrival()
                continue
            submission, news = found
            answer = self._running.get(submission)
            if answer is None:
                continue
            if news.error is not None:
                del self._running[submission]  # failed, which is not the same as abandoned
                self.close()
                raise from_scheduler(news.error)
            if news.result is None:
                continue
            if self._resume is None:
                return submission, news.result
            self._resume.put(submission, answer.choice.index, news.result)

    def _note_times(self, choice: Choice, count: int) -> None:
        if not count:
            return
        now = time.monotonic()
        since = now - (choice.last_token or choice.submitted)
        choice.last_token = now
        choice.first_token = choice.first_token or now
        for observer in self._server.observers:
            observer.tokens(choice, count, since)

    def _finished(self, choice: Choice, finish: Finish) -> TextDelta:
        choice.finish = finish
        self._server.crowd.served()
        for observer in self._server.observers:
            observer.finished(choice)
        return TextDelta(choice.index, "", 0, [], finish)


class _Answer:
    """Turns one choice's tokens into text: detokenizes, finds stop strings, says why it ended.

    A `reader` takes the text apart.
    """

    def __init__(self, choice: Choice, server: ServerState, reader: AnswerReader | None) -> None:
        request, tokenizer = choice.request, server.tokenizer
        context: list[int] = choice.prompt_token_ids[-16:].tolist()
        self.choice = choice
        self._reader = reader
        self._closing = server.formats.closing if request.max_thinking_tokens is not None else []
        self._text = tokenizer.detokenizer(context, request.skip_special_tokens, server.formats.kept(request))
        self._details = tokenizer.detokenizer(context, False) if request.token_details else None
        self._is_special = tokenizer.is_special
        self._stops = StopStrings(choice.sampling.stop or [], request.keep_stop)
        self._patterns = StopPatterns(request.stop_patterns)
        self._stoppable = bool(choice.sampling.stop or request.stop_patterns)
        self._min_tokens = choice.sampling.min_new_tokens

    def absorb(self, output: TextGenerationOutput) -> TextDelta:
        choice = self.choice
        if choice.only_scores:
            ended = output.final_status is not GenerationStatus.ACTIVE
            cancelled = output.final_status is GenerationStatus.CANCELLED
            choice.cached_tokens = output.num_cached_tokens or choice.cached_tokens
            return TextDelta(choice.index, "", 0, [], Finish("cancelled" if cancelled else "length") if ended else None)
        before = choice.completion_tokens
        pieces: list[str] = []
        i = -1
        last = len(output.tokens) - 1
        at_stop_token = output.final_status is GenerationStatus.END_OF_SEQUENCE
        logprobs = output.log_probabilities
        for i, token in enumerate(output.tokens):
            choice.completion_tokens += 1
            report = logprobs[i] if logprobs and i < len(logprobs) else None
            if report is not None:
                choice.logprob_sum += report.token_log_probabilities[0]
            if self._details is not None:
                choice.tokens.append(self._detail(self._details.add(token), token, report))
            hidden = at_stop_token and i == last and not choice.request.keep_stop
            pieces.append("" if hidden else self._cut(self._text.add(token)))
            if self._reader is not None:
                self._reader.add(token, pieces[-1])
                if self._reader.enough or self.has_thought_enough:
                    break
            if self._stoppable and (self._stops.matched is not None or self._patterns.matched is not None):
                break
        if not before:
            choice.cached_tokens = output.num_cached_tokens or choice.cached_tokens
        goes_on = self.has_thought_enough and output.final_status is not GenerationStatus.CANCELLED
        finish = None if goes_on else self._end(output.final_status, pieces)
        parts = self._read(pieces[i + 1 :], finish)
        text = "".join(pieces) if self._reader is None or not choice.request.parse_answer else text_of(parts)
        choice.pieces.append(text)
        return TextDelta(choice.index, text, choice.completion_tokens - before, choice.tokens[before:], finish, parts)

    @property
    def has_thought_enough(self) -> bool:
        """Whether reasoning is to be ended from outside, and there is room for that."""
        if self._reader is None or not self._reader.exhausted or not self._closing:
            return False
        longest = self.choice.context.max_length
        length = self.choice.prompt_tokens + self.choice.completion_tokens + len(self._closing)
        return longest is None or length < longest

    def go_on(self) -> TextContext:
        """The context with the end of its reasoning instead of what came after the last token that was read."""
        context = self.choice.context
        context.drop_last_tokens(len(context.tokens) - self.choice.prompt_tokens - self.choice.completion_tokens)
        context.status = GenerationStatus.ACTIVE
        closing, self._closing = self._closing, []
        for token in closing:
            # What is forced is certain.
            context.receive_token(token, LogProbabilities([0.0], [{}]) if context.log_probabilities else None)
        return context

    def _read(self, rest: Sequence[str], finish: Finish | None) -> Sequence[Piece]:
        """The pieces of a delta; `rest` is text that came with no token of its own."""
        if self._reader is None:
            return ()
        self._reader.feed("".join(rest))
        if finish is not None:
            self._reader.finish()
        self.choice.reasoning_tokens = self._reader.reasoning_tokens
        return self._reader.take()

    def _cut(self, piece: str) -> str:
        # As with EOS and stop ids, stop strings count only after the minimum length.
        if not self._stoppable or self.choice.completion_tokens <= self._min_tokens:
            return piece
        text = self._stops.add(piece)
        if self._stops.matched is None:
            self._patterns.add(piece)
        return text

    def _detail(self, text: str, token: int, report: LogProbabilities | None) -> TokenDelta:
        special = self._is_special(token)
        if report is None:
            return TokenDelta(token, text, None, special, {}, {})
        asked = report.asked_log_probabilities
        return TokenDelta(
            token,
            text,
            report.token_log_probabilities[0],
            special,
            report.top_log_probabilities[0],
            asked[0] if asked else {},
        )

    def _end(self, status: GenerationStatus, pieces: list[str]) -> Finish | None:
        if status is _GOES_ON and self._reader is None and not self._stoppable:
            return None
        if self._reader is not None and self._reader.enough:
            return Finish("stop_token")
        if self._stops.matched is None and status.is_done:
            pieces.append(self._stops.add(self._text.flush()))
        if self._stops.matched is not None:
            return Finish("stop_string", self._stops.matched)
        if self._patterns.matched is not None:
            pieces.append(self._stops.flush())
            return Finish("stop_string", self._patterns.matched)
        if not status.is_done:
            return None
        pieces.append(self._stops.flush())
        if status is GenerationStatus.END_OF_SEQUENCE:
            return Finish("stop_token", self.choice.token_ids[-1] if self.choice.completion_tokens else None)
        return Finish("length" if status is GenerationStatus.MAXIMUM_LENGTH else "cancelled")
