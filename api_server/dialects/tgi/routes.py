"""The TGI dialect's endpoints, without the paths that it shares with another dialect (`dialects/generate_route.py`)."""

from __future__ import annotations

import orjson
from starlette.responses import Response
from starlette.routing import Route

from api_server.chat.media_parts import arguments
from api_server.dialects.tgi import chat_tokenize
from api_server.dialects.tgi.errors import ERROR_STATUSES, error_frame
from api_server.dialects.tgi.generate import check, internal_request, prompt_and_images, read
from api_server.dialects.tgi.rendering import answer, events, headers, is_complete, stream_headers
from api_server.dialects.tgi.schema import (
    CompatGenerateRequest,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Info,
    SimpleToken,
    StreamResponse,
    TokenizeRequest,
)
from api_server.dialects.tgi.validation import MAX_STOP_SEQUENCES
from api_server.errors import ErrorKind, RequestFailed
from api_server.generation.generation import generate
from api_server.release import release
from api_server.text.tokenizer import THREADS, TokenSpan
from api_server.web.endpoint import Call, Document
from api_server.web.sse import EventStream
from interfaces import RequestID, TextGenerationRequest

TAG = "tgi"

_ERRORS = dict.fromkeys(ERROR_STATUSES, ErrorResponse)
_EXAMPLE = {"inputs": "What is 2 + 3?", "parameters": {"max_new_tokens": 20, "details": True, "top_n_tokens": 2}}

GENERATE = Document(
    summary="Generate text",
    tag=TAG,
    body=GenerateRequest,
    answer=GenerateResponse,
    example=_EXAMPLE,
    errors=_ERRORS,
    description="Greedy unless `parameters` ask for sampling; without `parameters` tokens are sampled.",
    generates=True,
)
GENERATE_STREAM = Document(
    summary="Generate text, one event per token",
    tag=TAG,
    body=GenerateRequest,
    frame=StreamResponse,
    example=_EXAMPLE,
    errors=_ERRORS,
    description="Errors known before the first token have their HTTP status; later ones are the last event.",
)
COMPAT = Document(
    summary="Generate text, streamed or not",
    tag=TAG,
    body=CompatGenerateRequest,
    answer=GenerateResponse,
    listed=True,
    frame=StreamResponse,
    example=_EXAMPLE | {"stream": False},
    errors=_ERRORS,
    description="Without `stream` the answer is a list of one.",
)
TOKENIZE = Document(
    summary="Tokens of a text",
    tag=TAG,
    body=TokenizeRequest,
    answer=SimpleToken,
    listed=True,
    example={"inputs": "My name is Olivier and I"},
    errors={400: ErrorResponse, 422: ErrorResponse},
)
INFO = Document(summary="Model and limits", tag=TAG, answer=Info, errors={503: ErrorResponse})


def routes() -> list[Route]:
    return [chat_tokenize.route()]


async def generate_once(call: Call) -> Response:
    """POST /generate; a `stream` key is ignored here, as upstream."""
    return await _complete(await call.apart(lambda: read(GenerateRequest, call)), call, listed=False)


async def generate_stream(call: Call) -> Response:
    """POST /generate_stream."""
    return await _stream(await call.apart(lambda: read(GenerateRequest, call)), call)


async def compat_generate(call: Call) -> Response:
    """POST /."""
    body = await call.apart(lambda: read(CompatGenerateRequest, call))
    return await (_stream(body, call) if body.stream else _complete(body, call, listed=True))


async def tokenize(call: Call) -> Response:
    """POST /tokenize with `inputs`: the tokens with their places in the text."""
    body = await call.apart(lambda: read(TokenizeRequest, call))
    spans = await _spans(body.inputs, call)
    keep = body.parameters.truncate if body.parameters else None
    shown = spans if keep is None else spans[max(0, len(spans) - keep) :]
    tokens = [{"id": s.id, "text": s.text, "start": s.start, "stop": s.stop} for s in shown]
    return Response(orjson.dumps(tokens), media_type="application/json")


async def _spans(inputs: str, call: Call) -> list[TokenSpan]:
    """The tokens of a prompt. An image in it is shown as the tokens that stand for it."""
    tokenizer = call.server.tokenizer
    text, loaded = await prompt_and_images(inputs, call)
    if not loaded:
        return await tokenizer.spans(inputs)
    request = TextGenerationRequest(RequestID(call.request_id), prompt=text, **arguments(loaded))
    prompt = await tokenizer.prompt(request, None)
    return await tokenizer.spans(prompt.text or "", parts=prompt.parts)


async def info(call: Call) -> Response:
    """GET /info of a model that generates."""
    settings = call.server.settings
    total = call.server.max_model_len
    if total is None:
        raise RequestFailed(ErrorKind.UNAVAILABLE, "the model is not loaded yet", retry_after=1)
    facts = Info(
        model_id=settings.model or call.server.model_name,
        model_sha=None,
        model_pipeline_tag="text-generation",
        max_concurrent_requests=call.server.most_requests,
        max_best_of=settings.max_best_of,
        max_stop_sequences=MAX_STOP_SEQUENCES,
        max_input_tokens=total - 1,
        max_total_tokens=total,
        validation_workers=THREADS,
        max_client_batch_size=settings.max_queued,
        router="tokenyard",
        version=release(),
        sha=None,
        docker_label=None,
    )
    return Response(facts.model_dump_json(), media_type="application/json")


async def _complete(body: GenerateRequest, call: Call, listed: bool) -> Response:
    check(body, call, streaming=False)
    generation = await generate(call.server, await internal_request(body, call, streaming=False))
    choices = sorted(await generation.collect(), key=lambda choice: choice.mean_logprob, reverse=True)
    if not all(map(is_complete, choices)):
        raise RequestFailed(ErrorKind.INTERNAL, "Incomplete generation", counted=True)
    content = await answer(body, choices, call.server.tokenizer)
    encoded = orjson.dumps([content] if listed else content)
    return Response(encoded, headers=headers(call, body, choices[0]), media_type="application/json")


async def _stream(body: GenerateRequest, call: Call) -> Response:
    check(body, call, streaming=True)
    generation = await generate(call.server, await internal_request(body, call, streaming=True))
    response = EventStream(events(body, generation, call.server.tokenizer), generation.close, error_frame)
    response.headers.update(stream_headers(call, body))
    return response
