"""Writes OpenAI's answers and chunks from the facts of a generation.

Knows the JSON forms; chat and plain completions differ in one object per choice, everything else is common.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from api_server.answers.choice import Choice, Finish, TextDelta, complete
from api_server.dialects.openai.extras import StreamedIds
from api_server.dialects.openai.logprobs import Echo, LogprobWriter, joined
from api_server.dialects.openai.schema import StreamOptions
from api_server.generation.generation import Generation
from api_server.parsers.scanner import Piece, Thought
from api_server.state import ServerState
from api_server.web.sse import DONE, frame

_REASON = {"stop_token": "stop", "stop_string": "stop", "length": "length"}


@dataclass(frozen=True)
class Envelope:
    """Fields that every answer and every chunk of one request repeats."""

    prefix: str
    model: str
    system_fingerprint: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
            **more,
        }


def envelope(server: ServerState, prefix: str, adapter: str | None = None) -> Envelope:
    """What stands around all parts of one answer, of the model or of one of its adapters."""
    return Envelope(prefix, adapter or server.model_name, server.fingerprint)


def finish_reason(finish: Finish | None, calls: bool = False) -> str:
    """The finish reason. `calls`: the answer has calls. Raises RequestFailed when the server cut the answer off."""
    reason = _REASON[complete(finish).kind]
    return "tool_calls" if calls and reason == "stop" else reason


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """The usage of an answer. A prompt counts once for all of its answers."""
    first_of_prompt = {choice.request_index: choice for choice in reversed(choices)}.values()
    prompt = sum(choice.prompt_tokens for choice in first_of_prompt)
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in first_of_prompt)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }


def chat_answer(envelope: Envelope, choices: Sequence[Choice], writer: LogprobWriter | None) -> dict[str, Any]:
    """The whole body of a chat answer; a `writer` adds the log probabilities."""
    rendered = [
        {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": None if writer is None else writer.chat(choice.tokens),
            "finish_reason": finish_reason(choice.finish, bool(choice.answer.calls)),
        }
        for choice in choices
    ]
    return envelope.around("chat.completion", rendered, usage=usage(choices))


def _message(choice: Choice) -> dict[str, Any]:
    answer = choice.answer
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not answer.text else answer.text,
        "refusal": None,
    }
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    return message | {"tool_calls": calls} if calls else message


def delta_of(piece: Piece) -> dict[str, Any]:
    """The delta of a piece of an answer."""
    if isinstance(piece, Thought):
        return {"reasoning_content": piece.text, "reasoning": piece.text}
    if piece.content is not None:
        return {"content": piece.content}
    if piece.name is None:
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments or ""}}]}
    function = {"name": piece.name, "arguments": piece.arguments or ""}
    return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}


def completion_answer(
    envelope: Envelope,
    drawn: Sequence[Choice],
    choices: Sequence[Choice],
    echoes: Sequence[Echo],
    writer: LogprobWriter | None,
) -> dict[str, Any]:
    """The whole body of a completion with `choices`, the best of those `drawn`; `echoes[i]` precedes choice i."""

    def logprobs(choice: Choice) -> dict[str, Any] | None:
        if writer is None:
            return None
        echo = echoes[choice.index]
        prompt = [writer.prompt(choice, echo)] if echo.offsets is not None else []
        return joined([*prompt, writer.completion(choice, choice.tokens)])

    rendered = [
        _completion_choice(
            index, echoes[choice.index].text + choice.text, finish_reason(choice.finish), logprobs(choice)
        )
        for index, choice in enumerate(choices)
    ]
    return envelope.around("text_completion", rendered, usage=usage(drawn))


def best(choices: Sequence[Choice], n: int) -> list[Choice]:
    """The `n` most likely choices of each prompt, by mean logprob; all, unchanged, when there are no more."""
    found = []
    for _, group in itertools.groupby(choices, key=lambda choice: choice.request_index):
        drawn = list(group)
        best = sorted(drawn, key=lambda choice: choice.mean_logprob, reverse=True)
        found += best[:n] if len(drawn) > n else drawn
    return found


def chat_frames(
    envelope: Envelope,
    generation: Generation,
    options: StreamOptions | None,
    writer: LogprobWriter | None,
    ids: StreamedIds | None,
) -> AsyncIterator[bytes]:
    """Yields the role, then the text as it comes, then an empty delta with the reason.

    With `ids` the first chunk has the ids of the prompt, and each choice those of its tokens.
    """
    opening = [_chat_choice(choice.index, {"role": "assistant", "content": ""}, None) for choice in generation.choices]

    def render(delta: TextDelta, reason: str | None) -> list[dict[str, Any]]:
        logprobs = None if writer is None or not delta.tokens else writer.chat(delta.tokens)
        # A delta whose text is still held back has tokens, too.
        silent = logprobs is not None or (ids is not None and delta.count > 0)
        deltas = [delta_of(piece) for piece in delta.pieces] or [{"content": ""}] * silent
        rendered = [_chat_choice(delta.index, each, None, None if i else logprobs) for i, each in enumerate(deltas)]
        if ids is not None and rendered:
            rendered[0] |= ids.next(generation.choices[delta.index], delta.count)
        return rendered if reason is None else [*rendered, _chat_choice(delta.index, {}, reason)]

    prompt = {} if ids is None else ids.first(generation.choices[0])
    return _frames(envelope, "chat.completion.chunk", generation, options, opening, render, prompt)


def completion_frames(
    envelope: Envelope,
    generation: Generation,
    options: StreamOptions | None,
    echoes: Sequence[Echo],
    writer: LogprobWriter | None,
    ids: StreamedIds | None,
) -> AsyncIterator[bytes]:
    """Yields the echo, then the text as it comes; the last text has the reason.

    With `ids` each choice has the ids of its tokens, and in its first chunk those of its prompt.
    """
    # The prompt's log probabilities are there with the first delta of its choice, not before.
    unsaid = {index: echo for index, echo in enumerate(echoes) if echo.offsets is not None}
    opening = [
        _completion_choice(index, echo.text, None) | ({} if ids is None else ids.first(generation.choices[index]))
        for index, echo in enumerate(echoes)
        if echo.text and not unsaid
    ]

    def render(delta: TextDelta, reason: str | None) -> list[dict[str, Any]]:
        choice = generation.choices[delta.index]
        rendered = []
        echo = unsaid.pop(delta.index, None)
        if echo is not None and writer is not None:
            rendered.append(_completion_choice(choice.index, echo.text, None, writer.prompt(choice, echo)))
        logprobs = None if writer is None or not delta.tokens else writer.completion(choice, delta.tokens)
        if delta.text or logprobs or reason or (ids is not None and delta.count):
            rendered.append(_completion_choice(delta.index, delta.text, reason, logprobs))
        if ids is not None and rendered:
            rendered[0] |= ids.first(choice)
            rendered[-1] |= ids.next(choice, delta.count)
        return rendered

    return _frames(envelope, "text_completion", generation, options, opening, render)


async def _frames(
    envelope: Envelope,
    kind: str,
    generation: Generation,
    options: StreamOptions | None,
    opening: list[dict[str, Any]],
    render: Callable[[TextDelta, str | None], list[dict[str, Any]]],
    more: dict[str, Any] | None = None,
) -> AsyncIterator[bytes]:
    """Yields the frames of a stream; `render` makes a delta's choices, and `more` goes into the first chunk."""
    include_usage = options is not None and options.asks_for_usage
    continuous = options is not None and bool(options.continuous_usage_stats)

    def chunk(choice: dict[str, Any], **more: Any) -> bytes:
        if include_usage:
            more["usage"] = usage(generation.choices) if continuous else None
        return frame(envelope.around(kind, [choice], **more))

    if opening:
        yield chunk(opening[0], **(more or {})) + b"".join(map(chunk, opening[1:]))
    async for delta in generation:
        reason = None
        if delta.finish is not None:
            reason = finish_reason(delta.finish, bool(generation.choices[delta.index].answer.calls))
        rendered = render(delta, reason)
        if rendered:
            yield b"".join(map(chunk, rendered))
    if include_usage:
        yield frame(envelope.around(kind, [], usage=usage(generation.choices)))
    yield DONE


def _chat_choice(
    index: int, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _completion_choice(
    index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
