"""What is kept of a request that has ended, until its spans are made. No text of a prompt or an answer, and no key.

To note a request is cheap, because it happens in the event loop. Attributes are made of it in the exporter's thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.types import Scope

from api_server.access_log import CLIENT_GONE, LONGEST_PATH, Entry
from api_server.answers.choice import Choice, Finish
from api_server.answers.one_shot import OneShot
from api_server.outcomes import Outcome
from api_server.trace_context import TraceContext
from api_server.tracing import names
from interfaces import SamplingParams

# Largest whole number of a span's attribute.
_LARGEST = (1 << 63) - 1


class Answer(NamedTuple):
    """One answer. Times are `time.monotonic()`'s, durations are seconds."""

    model: str
    request_id: str
    # Position of its prompt in the request, and the answers that were asked for with each prompt.
    prompt: int
    n: int
    sampling: SamplingParams | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    finish: Finish | None
    submitted: float
    queued: float | None
    first_token: float | None
    last_token: float | None


class Texts(NamedTuple):
    """What a request had for one forward pass."""

    model: str
    texts: int
    tokens: int
    audio_seconds: float | None


class Record(NamedTuple):
    """One HTTP request. `offset_ns` plus a time of `time.monotonic()` in nanoseconds is Unix time."""

    span: TraceContext
    caller: TraceContext | None
    request_id: str
    method: str
    path: str
    # Address and port at which it came.
    server: Sequence[Any]
    status: int
    outcome: str
    # A failed request's kind of error, and the field that it is about; both empty for others. Messages are not kept,
    # because they may quote a client's values.
    error: str
    field: str
    started: float
    ended: float
    offset_ns: int
    answers: list[Answer]
    shots: list[Texts]

    @property
    def served(self) -> bool:
        """Whether the scheduler has had something of it."""
        return bool(self.answers or self.shots)

    @property
    def model(self) -> str:
        found = [answer.model for answer in self.answers] + [shot.model for shot in self.shots]
        return next(filter(None, found), "")


def record(scope: Scope, entry: Entry, span: TraceContext, caller: TraceContext | None) -> Record | None:
    """Notes an ended request. None for one that was neither computed nor refused, such as an operator's."""
    answers = [_answer(choice) for generation in entry.choices for choice in generation]
    error = entry.error
    if not answers and not entry.shots and error is None:
        return None
    now = time.monotonic()
    outcome = entry.outcome
    failed = outcome not in (Outcome.OK, Outcome.CANCELLED)
    return Record(
        span,
        caller,
        scope.get("state", {}).get("request_id", ""),
        scope["method"],
        scope["path"][:LONGEST_PATH],
        scope.get("server") or ("", None),
        entry.status or CLIENT_GONE,
        outcome,
        "" if not failed else outcome if error is None else str(error.kind),
        (error.field or "") if failed and error is not None else "",
        entry.started,
        now,
        time.time_ns() - int(now * 1e9),
        answers,
        [_texts(shot) for shot in entry.shots],
    )


def _answer(choice: Choice) -> Answer:
    return Answer(
        choice.model,
        choice.context.request_id,
        choice.request_index,
        choice.request.n,
        choice.sampling,
        choice.prompt_tokens,
        choice.cached_tokens,
        choice.completion_tokens,
        choice.reasoning_tokens,
        choice.finish,
        choice.submitted,
        choice.queued,
        choice.first_token,
        choice.last_token,
    )


def _texts(shot: OneShot) -> Texts:
    return Texts(shot.model, shot.texts, shot.tokens, None if shot.sound is None else shot.sound.seconds)


def request_attributes(record: Record) -> dict[str, Any]:
    """The attributes of the HTTP request. None is left out later."""
    found: dict[str, Any] = {
        names.METHOD: record.method,
        names.PATH: record.path,
        names.STATUS: record.status,
        names.SERVER_ADDRESS: record.server[0],
        names.SERVER_PORT: record.server[1],
        names.REQUEST_ID: record.request_id,
        names.OUTCOME: record.outcome,
        names.ERROR_TYPE: record.error or None,
    }
    answers = record.answers
    if answers:
        first = answers[0]
        found |= _of_sampling(first)
        found |= {
            names.STOP_SEQUENCES: list((first.sampling.stop if first.sampling else ()) or ()) or None,
            names.CHOICE_COUNT: first.n,
            names.FINISH_REASONS: [_finish(answer) for answer in answers],
            names.INPUT_TOKENS: sum({answer.prompt: answer.prompt_tokens for answer in answers}.values()),
            names.OUTPUT_TOKENS: sum(answer.completion_tokens for answer in answers),
            names.CACHED_TOKENS: sum(answer.cached_tokens for answer in answers),
            names.REASONING_TOKENS: sum(answer.reasoning_tokens for answer in answers) or None,
        }
    if record.shots:
        found |= {
            names.TEXTS: sum(shot.texts for shot in record.shots),
            names.INPUT_TOKENS: sum(shot.tokens for shot in record.shots),
            names.AUDIO_SECONDS: sum(shot.audio_seconds or 0.0 for shot in record.shots) or None,
        }
    return found


def answer_attributes(answer: Answer, started: float) -> dict[str, Any]:
    """The attributes of one answer, under vLLM's names. `started` is when its request came."""
    placed = None if answer.queued is None else answer.submitted + answer.queued
    return {
        names.REQUEST_MODEL: answer.model,
        names.REQUEST_ID: str(answer.request_id),
        names.REQUEST_N: answer.n,
        names.PROMPT_TOKENS: answer.prompt_tokens,
        names.COMPLETION_TOKENS: answer.completion_tokens,
        names.FINISH_REASONS: [_finish(answer)],
        names.TIME_IN_QUEUE: answer.queued,
        names.TIME_TO_FIRST_TOKEN: _between(started, answer.first_token),
        names.END_TO_END: _between(started, answer.last_token),
        names.TIME_IN_PREFILL: _between(placed, answer.first_token),
        names.TIME_IN_DECODE: _between(answer.first_token, answer.last_token),
        names.TIME_IN_INFERENCE: _between(placed, answer.last_token),
        **_of_sampling(answer),
    }


def _of_sampling(answer: Answer) -> dict[str, Any]:
    if answer.sampling is None:
        return {}
    return {name: _number(getattr(answer.sampling, field)) for field, name in names.SAMPLING.items()}


def _finish(answer: Answer) -> str:
    if answer.finish is None:
        return "cancelled"
    return "stop" if answer.finish.kind.startswith("stop") else answer.finish.kind


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def _number(value: Any) -> Any:
    """A number as an attribute may have it: a seed can be larger."""
    return str(value) if isinstance(value, int) and value > _LARGEST else value
