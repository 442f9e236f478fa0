"""Writes Anthropic's message and its stream of events from the facts of a generation."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson

from api_server.answers.choice import Choice, complete
from api_server.generation.generation import Generation
from api_server.parsers.answer import Block, Call, ParsedAnswer, Passage
from api_server.parsers.scanner import Piece, Thought
from api_server.web.sse import named_frame

_REASON = {"stop_token": "end_turn", "stop_string": "stop_sequence"}


# The edits of the context that have acted; None: the request asked for none.
Edits = list[dict[str, Any]] | None


def message(model: str, choice: Choice, edits: Edits) -> dict[str, Any]:
    """The whole body of an answer."""
    blocks = [_block(block) for block in choice.answer.blocks] or [_EMPTY]
    return _message(model, blocks, _ending(choice), _usage(choice)) | _managed(edits)


async def frames(model: str, generation: Generation, edits: Edits) -> AsyncIterator[bytes]:
    """Yields events block by block, as each is generated; the reason and the final usage come at the end."""
    choice = generation.choices[0]
    opening = _message(model, [], {"stop_reason": None, "stop_sequence": None}, _usage(choice))
    yield named_frame({"type": "message_start", "message": opening}) + named_frame({"type": "ping"})
    sent = ParsedAnswer()
    async for delta in generation:
        events = b"".join(_events_of(sent, piece) for piece in delta.pieces)
        if events:
            yield events
    last = len(sent.blocks) - 1
    yield (
        (_start(0, _EMPTY) + _stop(0) if last < 0 else _stop(last))
        + named_frame({"type": "message_delta", "delta": _ending(choice), "usage": _usage(choice)} | _managed(edits))
        + named_frame({"type": "message_stop"})
    )


def _managed(edits: Edits) -> dict[str, Any]:
    return {} if edits is None else {"context_management": {"applied_edits": edits}}


def _events_of(sent: ParsedAnswer, piece: Piece) -> bytes:
    """The events of one piece. `sent` holds the blocks that the client has; the last one is open."""
    known = len(sent.blocks)
    sent.add([piece])
    index = len(sent.blocks) - 1
    opening = b""
    if index == known:
        opening = (_stop(known - 1) if known else b"") + _start(index, _begun(sent.blocks[-1]))
    if isinstance(piece, Thought):
        delta = {"type": "thinking_delta", "thinking": piece.text}
    elif piece.content is not None:
        delta = {"type": "text_delta", "text": piece.content}
    elif piece.arguments:
        delta = {"type": "input_json_delta", "partial_json": piece.arguments}
    else:
        return opening
    return opening + named_frame({"type": "content_block_delta", "index": index, "delta": delta})


def _start(index: int, block: dict[str, Any]) -> bytes:
    return named_frame({"type": "content_block_start", "index": index, "content_block": block})


def _stop(index: int) -> bytes:
    return named_frame({"type": "content_block_stop", "index": index})


def _block(block: Block) -> dict[str, Any]:
    if isinstance(block, Call):
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block.parsed.arguments)}
    if block.is_thought:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _begun(block: Block) -> dict[str, Any]:
    """An opened block, before its content."""
    if isinstance(block, Call):
        return _block(Call(block.id, block.name))
    return _block(Passage(block.is_thought))


_EMPTY = _block(Passage(False))


def _input(arguments: str) -> dict[str, Any]:
    """The input of a tool use. Arguments that broke off, or are not JSON, give an empty input."""
    try:
        found = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _message(
    model: str, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, int]
) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **ending,
        "usage": usage,
    }


def _ending(choice: Choice) -> dict[str, Any]:
    finish = complete(choice.finish)
    if finish.kind == "length":
        asked = choice.request.sampling and choice.request.sampling.max_new_tokens
        reached = choice.sampling.max_new_tokens == asked
        return {"stop_reason": "max_tokens" if reached else "model_context_window_exceeded", "stop_sequence": None}
    if choice.answer.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    matched = finish.matched if finish.kind == "stop_string" else None
    return {"stop_reason": _REASON[finish.kind], "stop_sequence": matched}


def _usage(choice: Choice) -> dict[str, int]:
    """The usage of an answer. Anthropic counts cached tokens beside the input tokens, not among them."""
    return {
        "input_tokens": choice.prompt_tokens - choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": choice.cached_tokens,
        "output_tokens": choice.completion_tokens,
    }
