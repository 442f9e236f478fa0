"""Writes Anthropic's message and its stream of events from the facts of a generation."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from api_server.generation import Choice, Generation, complete
from api_server.sse import named_frame

_REASON = {"stop_token": "end_turn", "stop_string": "stop_sequence"}


def message(model: str, choice: Choice) -> dict[str, Any]:
    """The whole body of an answer."""
    return _message(model, [_block(choice.text)], _ending(choice), _usage(choice))


async def frames(model: str, generation: Generation) -> AsyncIterator[bytes]:
    """One content block, whose text comes as it is generated; the reason and the final usage at the end."""
    choice = generation.choices[0]
    opening = _message(model, [], {"stop_reason": None, "stop_sequence": None}, _usage(choice))
    yield (
        named_frame({"type": "message_start", "message": opening})
        + named_frame({"type": "content_block_start", "index": 0, "content_block": _block("")})
        + named_frame({"type": "ping"})
    )
    async for delta in generation:
        if delta.text:
            text = {"type": "text_delta", "text": delta.text}
            yield named_frame({"type": "content_block_delta", "index": 0, "delta": text})
    yield (
        named_frame({"type": "content_block_stop", "index": 0})
        + named_frame({"type": "message_delta", "delta": _ending(choice), "usage": _usage(choice)})
        + named_frame({"type": "message_stop"})
    )


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


def _block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _ending(choice: Choice) -> dict[str, Any]:
    finish = complete(choice.finish)
    if finish.kind == "length":
        asked = choice.request.sampling and choice.request.sampling.max_new_tokens
        reached = choice.sampling.max_new_tokens == asked
        return {"stop_reason": "max_tokens" if reached else "model_context_window_exceeded", "stop_sequence": None}
    matched = finish.matched if finish.kind == "stop_string" else None
    return {"stop_reason": _REASON[finish.kind], "stop_sequence": matched}


def _usage(choice: Choice) -> dict[str, int]:
    """Anthropic counts cached tokens beside the input tokens, not among them."""
    return {
        "input_tokens": choice.prompt_tokens - choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": choice.cached_tokens,
        "output_tokens": choice.completion_tokens,
    }
