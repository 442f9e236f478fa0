"""Shortens an input that is too long: `truncation: auto` removes its oldest turns; nothing is compacted."""

from __future__ import annotations

from dataclasses import replace

from api_server.chat.media_parts import of_messages
from api_server.dialects.openai.responses.schema import ResponsesBody
from api_server.errors import ErrorKind, RequestFailed, unsupported
from api_server.state import ServerState
from interfaces import TextGenerationRequest


async def managed(server: ServerState, body: ResponsesBody, request: TextGenerationRequest) -> TextGenerationRequest:
    """Applies `truncation` and `context_management`. Raises RequestFailed for a compaction that would have to act."""
    for i, edit in enumerate(body.context_management or ()):
        limit = edit.compact_threshold
        if limit is None or not await _fits(server, request, limit):
            raise unsupported(f"context_management[{i}]", "compacting the context")
    return await _truncated(server, request) if body.truncation == "auto" else request


async def _truncated(server: ServerState, request: TextGenerationRequest) -> TextGenerationRequest:
    """The request without the oldest turns that do not fit. The instructions and the last turn stay."""
    if server.max_model_len is None:
        return request
    room = server.max_model_len - ((request.sampling and request.sampling.max_new_tokens) or 1)
    roles = [message.role for message in request.messages]
    head = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    starts = [i for i, role in enumerate(roles) if role == "user" and i > head]
    candidates = [head, *starts]

    def without(index: int) -> TextGenerationRequest:
        kept = [*request.messages[:head], *request.messages[candidates[index] :]]
        return replace(request, messages=kept, **of_messages(kept))

    first = 0
    last = len(candidates) - 1
    while first < last:
        middle = (first + last) // 2
        if await _fits(server, without(middle), room):
            last = middle
        else:
            first = middle + 1
    return without(first)


async def _fits(server: ServerState, request: TextGenerationRequest, room: int) -> bool:
    try:
        return len((await server.tokenizer.prompt(request, max(room, 1))).tokens) <= room
    except RequestFailed as error:
        if error.kind is ErrorKind.TOO_LONG:
            return False
        raise
