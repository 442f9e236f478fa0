"""Anthropic's endpoints: each reads its body, calls `generate` or counts, and writes the answer or the stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from starlette.responses import Response
from starlette.routing import BaseRoute

from api_server.dialects.anthropic import rendering, requests
from api_server.dialects.anthropic.errors import STATUSES, error_frame, render_error
from api_server.dialects.anthropic.schema import (
    Conversation,
    ErrorAnswer,
    Message,
    MessagesBody,
    StreamEvent,
    TokenCount,
)
from api_server.generation.generation import generate
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.sse import EventStream

TAG = "anthropic"

_ERRORS = dict.fromkeys(STATUSES, ErrorAnswer)
_EXAMPLE = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "system": "Be brief."}

_MESSAGES = Document(
    "Answer a conversation",
    TAG,
    body=MessagesBody,
    answer=Message,
    frame=StreamEvent,
    example=_EXAMPLE | {"max_tokens": 50},
    errors=_ERRORS,
)
_COUNT = Document(
    "Tokens of a conversation, as the model would read it",
    TAG,
    body=Conversation,
    answer=TokenCount,
    example=_EXAMPLE,
    errors=_ERRORS,
)


def routes() -> list[BaseRoute]:
    return [
        endpoint("/v1/messages", messages, render_error, document=_MESSAGES),
        endpoint("/v1/messages/count_tokens", count_tokens, render_error, document=_COUNT),
    ]


async def messages(call: Call) -> Response:
    body = await call.apart(lambda: requests.read(call, MessagesBody))
    model = call.server.check_model(body.model or "") or call.server.model_name
    asked = await requests.request(call, body)
    generation = await generate(call.server, asked.request)
    if body.stream:
        frames = rendering.frames(model, generation, asked.edits)
        stream = EventStream(frames, generation.close, partial(error_frame, request_id=call.request_id))
        return _named(stream, call)
    (choice,) = await generation.collect()
    return _json(rendering.message(model, choice, asked.edits), call)


async def count_tokens(call: Call) -> Response:
    given = await call.apart(lambda: requests.read(call, Conversation))
    asked = await requests.request(call, given)
    count: dict[str, Any] = {"input_tokens": await asked.count(asked.edited.messages)}
    if asked.edits is not None:
        count["context_management"] = {"original_input_tokens": await asked.count(given.messages)}
    return _json(count, call)


def _json(value: dict[str, Any], call: Call) -> Response:
    return _named(Response(orjson.dumps(value), media_type="application/json"), call)


def _named(response: Response, call: Call) -> Response:
    """Adds the request's id under the name that Anthropic's clients look for."""
    response.headers["request-id"] = call.request_id
    return response
