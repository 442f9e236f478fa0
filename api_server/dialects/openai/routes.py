"""OpenAI's endpoints: each reads its body, calls `generate`, and writes the answer or the stream."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from api_server.dialects.openai import extras, rendering, requests
from api_server.dialects.openai.errors import error_frame, render_error
from api_server.dialects.openai.logprobs import Echo, LogprobWriter, echo_of
from api_server.dialects.openai.responses import routes as responses
from api_server.dialects.openai.schema import (
    ChatAnswer,
    ChatBody,
    ChatChunk,
    CompletionAnswer,
    CompletionBody,
    ErrorAnswer,
    ExtendedBody,
)
from api_server.dialects.openai.spoken_chat import SpokenChat
from api_server.generation.generation import Generation, generate
from api_server.state import ServerState
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import json_response
from api_server.web.sse import EventStream

TAG = "openai"

_ERRORS = dict.fromkeys((400, 404, 413, 415, 429, 500, 503), ErrorAnswer)

_CHAT = Document(
    "Answer a conversation",
    TAG,
    body=ChatBody,
    answer=ChatAnswer,
    frame=ChatChunk,
    example={"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 50, "logprobs": True},
    errors=_ERRORS,
)
_COMPLETION = Document(
    "Continue a text",
    TAG,
    body=CompletionBody,
    answer=CompletionAnswer,
    frame=CompletionAnswer,
    example={"prompt": "Once upon a time", "max_tokens": 30, "echo": True, "logprobs": 2},
    errors=_ERRORS,
)


def routes() -> list[BaseRoute]:
    return [
        endpoint("/v1/chat/completions", chat_completions, render_error, document=_CHAT),
        endpoint("/v1/completions", completions, render_error, document=_COMPLETION),
        *responses.routes(),
    ]


async def chat_completions(call: Call) -> Response:
    body = await call.apart(lambda: requests.read(call, ChatBody))
    envelope = rendering.envelope(call.server, "chatcmpl", requests.adapter_of(call, body))
    if body.is_spoken:
        return await _spoken(call, body, envelope)
    generation = await generate(call.server, await requests.chat_request(call, body))
    writer = _writer(call, body, body.top_logprobs or 0) if body.logprobs else None
    if body.stream:
        ids = extras.StreamedIds() if body.return_token_ids else None
        frames = rendering.chat_frames(envelope, generation, body.stream_options, writer, ids)
        return EventStream(frames, generation.close, error_frame)
    choices = await generation.collect()
    answer = rendering.chat_answer(envelope, choices, writer)
    extras.add_to_chat(answer, body, choices, call.server.tokenizer)
    return json_response(answer)


async def _spoken(call: Call, body: ChatBody, envelope: rendering.Envelope) -> Response:
    """Answers a conversation by sound."""
    spoken = SpokenChat(call, body, envelope)
    generation = await generate(call.server, await requests.chat_request(call, body))

    def close() -> None:
        generation.close()
        spoken.close()

    try:
        # No clip is fetched for a request that is refused, by its fields, its length or a full queue.
        await spoken.begin()
    except BaseException:
        close()
        raise
    if body.stream:
        return EventStream(spoken.frames(generation), close, error_frame)
    try:
        return json_response(await spoken.answer(generation))
    finally:
        close()


async def completions(call: Call) -> Response:
    body = await call.apart(lambda: requests.read(call, CompletionBody))
    envelope = rendering.envelope(call.server, "cmpl", requests.adapter_of(call, body))
    generation = await generate(call.server, await call.apart(lambda: requests.completion_requests(call, body)))
    echoes = await _echoes(call.server, body, generation)
    writer = None if body.logprobs is None else _writer(call, body, body.logprobs)
    if body.stream:
        ids = extras.StreamedIds() if body.return_token_ids else None
        frames = rendering.completion_frames(envelope, generation, body.stream_options, echoes, writer, ids)
        return EventStream(frames, generation.close, error_frame)
    choices = rendering.best(await generation.collect(), body.n or 1)
    answer = rendering.completion_answer(envelope, generation.choices, choices, echoes, writer)
    extras.add_to_completion(answer, body, choices, call.server.tokenizer)
    return json_response(answer)


def _writer(call: Call, body: ExtendedBody, most: int) -> LogprobWriter:
    return LogprobWriter(call.server.tokenizer, most, as_ids=bool(body.return_tokens_as_token_ids))


async def list_models(call: Call) -> Response:
    models = [_model(state) for state in call.server.models]
    adapters = [_adapter(state, name) for state in call.server.models for name in state.adapters]
    return json_response({"object": "list", "data": [*models, *adapters]})


async def show_model(call: Call) -> Response:
    name = call.path_params["model"]
    adapter = call.server.check_model(name)
    return json_response(_model(call.server) if adapter is None else _adapter(call.server, adapter))


async def _echoes(server: ServerState, body: CompletionBody, generation: Generation) -> list[Echo]:
    """The text before each choice's text."""
    if not body.echo:
        return [Echo("")] * len(generation.choices)
    try:
        return [await echo_of(server.tokenizer, choice, body.logprobs is not None) for choice in generation.choices]
    except BaseException:
        generation.close()
        raise


def _model(server: ServerState) -> dict[str, Any]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "tokenyard",
        "root": server.model_name,
        "parent": None,
        "max_model_len": server.max_model_len,
        "task": server.task,
        **_voices(server),
        **_sizes(server),
    }


def _voices(server: ServerState) -> dict[str, Any]:
    """What clients want to know of a model that speaks."""
    if server.speaking is not None:
        return {"voices": server.speaking.voices, "sample_rate": server.speaking.sample_rate}
    if server.pooled_model is None or server.pooled_model.speech is None:
        return {}
    speech = server.pooled_model.speech
    return {"voices": list(speech.voices), "sample_rate": speech.sample_rate}


def _sizes(server: ServerState) -> dict[str, Any]:
    """What clients want to know of a model that paints."""
    if server.pooled_model is None or server.pooled_model.pixels is None:
        return {}
    pixels = server.pooled_model.pixels
    height, width = pixels.default_size
    return {
        "default_size": f"{width}x{height}",
        "size_multiple": pixels.multiple,
        "default_steps": pixels.default_steps,
        "default_guidance_scale": pixels.default_guidance,
        "loras": list(server.settings.adapter_paths),
    }


def _adapter(server: ServerState, name: str) -> dict[str, Any]:
    """An adapter, as a model with a parent. Its path is an operator's matter: `root` has the last part."""
    root = PurePath(server.adapters[name].path).name
    return _model(server) | {"id": name, "root": root, "parent": server.model_name}
