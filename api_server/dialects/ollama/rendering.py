"""Writes Ollama's answers and the lines of its streams from the facts of a generation.

Chat and generate differ in the place of text, reasoning and calls; everything else is the same.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from api_server.answers.choice import Choice, TextDelta, TokenDelta, complete
from api_server.dialects.ollama.lines import line
from api_server.dialects.openai.logprobs import LogprobWriter
from api_server.generation.generation import Generation
from api_server.parsers.answer import Call, ParsedAnswer
from api_server.parsers.scanner import Piece, Thought

# Makes the fields of an answer of its text, its reasoning and its calls.
Form = Callable[[str, str, Sequence[Call]], dict[str, Any]]

_NANOSECONDS = 1_000_000_000


def chat_form(text: str, thinking: str, calls: Sequence[Call]) -> dict[str, Any]:
    """The fields of a chat's answer."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [_call(call, i) for i, call in enumerate(calls)]
    return {"message": message}


def generate_form(text: str, thinking: str, calls: Sequence[Call]) -> dict[str, Any]:
    """The fields of a generate's answer."""
    return {"response": text, **({"thinking": thinking} if thinking else {})}


def envelope(model: str) -> dict[str, Any]:
    """The fields that begin each answer and each line."""
    return {"model": model, "created_at": timestamp()}


def timestamp(seconds: float | None = None) -> str:
    """A Unix time, or the present, in RFC 3339."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def loaded(model: str, form: Form, keep_alive: Any) -> dict[str, Any]:
    """The answer to a request without a prompt, by which clients load a model ahead, or unload it."""
    unloads = keep_alive in (0, "0", "0s")
    return envelope(model) | form("", "", ()) | {"done": True, "done_reason": "unload" if unloads else "load"}


def answer(model: str, choice: Choice, form: Form, writer: LogprobWriter | None, context: bool) -> dict[str, Any]:
    """The whole body of an answer."""
    parsed = choice.answer
    calls = [block for block in parsed.blocks if isinstance(block, Call)]
    text = parsed.text if choice.request.parse_answer else choice.text
    logprobs = {} if writer is None else {"logprobs": _logprobs(writer, choice.tokens)}
    return envelope(model) | form(text, parsed.reasoning, calls) | _ending(choice, context) | logprobs


async def lines(
    model: str, generation: Generation, form: Form, writer: LogprobWriter | None, context: bool
) -> AsyncIterator[bytes]:
    """Yields a line for each piece of text or reasoning, one for each whole call, and the last one with the facts."""
    choice = generation.choices[0]
    sent = ParsedAnswer()
    held: list[TokenDelta] = []
    async for delta in generation:
        held += delta.tokens
        written = b""
        for fields in _fields_of(delta, sent, choice, form):
            written += line(envelope(model) | fields | {"done": False} | _taken(writer, held))
        if written:
            yield written
    yield line(envelope(model) | form("", "", ()) | _ending(choice, context) | _taken(writer, held))


def keep_alive_line(model: str, form: Form) -> bytes:
    """A line that adds nothing, for a connection on which nothing has been written for a while."""
    return line(envelope(model) | form("", "", ()) | {"done": False})


def _fields_of(delta: TextDelta, sent: ParsedAnswer, choice: Choice, form: Form) -> Iterator[dict[str, Any]]:
    """The fields of each line of an update. `sent` holds what the client has; a call at its end is still open."""
    if not choice.request.parse_answer:
        if delta.text:
            yield form(delta.text, "", ())
        return
    for piece in delta.pieces:
        if _begins_a_block(piece) and (call := _open_call(sent)) is not None:
            yield form("", "", (call,))
        sent.add([piece])
        if isinstance(piece, Thought):
            yield form("", piece.text, ())
        elif piece.content:
            yield form(piece.content, "", ())
    if delta.finish is not None and (call := _open_call(sent)) is not None:
        yield form("", "", (call,))


def _begins_a_block(piece: Piece) -> bool:
    """True for text and reasoning after a call, and for another call."""
    return isinstance(piece, Thought) or piece.content is not None or piece.name is not None


def _open_call(sent: ParsedAnswer) -> Call | None:
    last = sent.blocks[-1] if sent.blocks else None
    return last if isinstance(last, Call) else None


def _call(call: Call, index: int) -> dict[str, Any]:
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": _arguments(call)}}


def _arguments(call: Call) -> dict[str, Any]:
    """The arguments as an object. Arguments that broke off, or are not JSON, give an empty one."""
    try:
        found = orjson.loads(call.parsed.arguments or "{}")
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _taken(writer: LogprobWriter | None, held: list[TokenDelta]) -> dict[str, Any]:
    """The log probabilities of the tokens that no line has had yet."""
    if writer is None or not held:
        return {}
    tokens = list(held)
    held.clear()
    return {"logprobs": _logprobs(writer, tokens)}


def _logprobs(writer: LogprobWriter, tokens: Sequence[TokenDelta]) -> Any:
    return writer.chat(tokens)["content"]


def _ending(choice: Choice, context: bool) -> dict[str, Any]:
    """The facts of a complete answer. Raises RequestFailed for one that the server cut off."""
    finish = complete(choice.finish)
    now = time.monotonic()
    first = choice.first_token or now
    last = choice.last_token or now
    received = choice.request.received
    known = {"context": [*choice.prompt_token_ids.tolist(), *choice.token_ids]} if context else {}
    return {
        "done": True,
        "done_reason": "length" if finish.kind == "length" else "stop",
        **known,
        "total_duration": _nanoseconds(now - received),
        "load_duration": _nanoseconds(choice.submitted - received),
        "prompt_eval_count": choice.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(first - choice.submitted),
        "eval_count": choice.completion_tokens,
        "eval_duration": _nanoseconds(last - first),
    }


def _nanoseconds(seconds: float) -> int:
    """A duration of at least one nanosecond: clients divide by it."""
    return max(1, round(seconds * _NANOSECONDS))
