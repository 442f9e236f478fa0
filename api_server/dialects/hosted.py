"""The paths that hosting platforms call, whatever the dialect: SageMaker's /invocations and Vertex AI's /vertex.

Knows which dialect a body's keys mean; the dialects do the rest. SageMaker's /ping is with the health routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.answers.choice import Choice
from api_server.body.item_limits import check_count
from api_server.body.validation import Mismatch, parse
from api_server.dialects.openai import embeddings
from api_server.dialects.openai import errors as openai_errors
from api_server.dialects.openai import requests as openai_requests
from api_server.dialects.openai.routes import TAG as OPENAI
from api_server.dialects.openai.routes import chat_completions, completions
from api_server.dialects.openai.schema import (
    ChatAnswer,
    ChatBody,
    ChatChunk,
    CompletionAnswer,
    CompletionBody,
    ErrorAnswer,
)
from api_server.dialects.sglang import errors as sglang_errors
from api_server.dialects.sglang import generate as sglang
from api_server.dialects.tei import errors as tei_errors
from api_server.dialects.tei import routes as tei
from api_server.dialects.tgi import errors as tgi_errors
from api_server.dialects.tgi import routes as tgi
from api_server.dialects.tgi.generate import check, internal_request, read
from api_server.dialects.tgi.rendering import answer, is_complete
from api_server.dialects.tgi.schema import ErrorResponse, GenerateRequest
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.generation.generation import generate
from api_server.web.endpoint import Call, Document, endpoint
from interfaces import TextGenerationRequest

Form = Literal["tgi", "sglang", "chat", "completion"]

_KEYS: dict[str, Form] = {
    "inputs": "tgi",
    "text": "sglang",
    "input_ids": "sglang",
    "input_embeds": "sglang",
    "messages": "chat",
    "prompt": "completion",
}
_OPENAI_ERRORS = dict.fromkeys((400, 404, 413, 415, 429, 500, 503), ErrorAnswer)
_CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 20}


class VertexBody(BaseModel):
    """The body of /vertex.

    Each instance is a body of `/generate` (`inputs`) or of `/v1/chat/completions` (`messages`).
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    instances: list[dict[str, Any]] = Field(min_length=1)


class VertexAnswer(BaseModel):
    predictions: list[str]


_VERTEX = Document(
    summary="Generate text for each instance",
    tag="tgi",
    body=VertexBody,
    answer=VertexAnswer,
    example={"instances": [{"inputs": "What is 2 + 3?", "parameters": {"max_new_tokens": 20}}, _CHAT_EXAMPLE]},
    errors=dict.fromkeys((*tgi_errors.ERROR_STATUSES, 404), ErrorResponse),
    description="Predictions are the generated texts, in the order of the instances.",
    generates=True,
)


def routes() -> list[Route]:
    chat = Document(
        summary="Answer a conversation",
        tag=OPENAI,
        body=ChatBody,
        answer=ChatAnswer,
        frame=ChatChunk,
        example=_CHAT_EXAMPLE,
        errors=_OPENAI_ERRORS,
    )
    completion = Document(
        summary="Continue a text",
        tag=OPENAI,
        body=CompletionBody,
        answer=CompletionAnswer,
        frame=CompletionAnswer,
        errors=_OPENAI_ERRORS,
    )
    by_keys = replace(tgi.COMPAT, also=(sglang.GENERATE, chat, completion, tei.EMBED))
    return [
        endpoint("/invocations", invocations, _render_error, document=by_keys),
        endpoint("/vertex", vertex, tgi_errors.render_error, document=_VERTEX),
    ]


async def invocations(call: Call) -> Response:
    """Serves bodies of `POST /`, `/generate`, `/v1/chat/completions` and `/v1/completions`, by their keys."""
    if call.server.pooled_model is not None:
        return await (embeddings.embeddings if "input" in call.json else tei.at_root)(call)
    names = _given(call.json)
    forms = {_KEYS[name] for name in names}
    if len(forms) > 1:
        raise invalid(f"{' and '.join(f'`{name}`' for name in names)} were given; give the keys of one kind of request")
    match next(iter(forms), None):
        case "tgi":
            return await tgi.compat_generate(call)
        case "sglang":
            return await sglang.generate_native(call)
        case "chat":
            return await chat_completions(call)
        case "completion":
            return await completions(call)
    raise tgi_errors.BodyMismatch("missing field `inputs`, `messages`, `prompt` or `text`", "inputs")


async def vertex(call: Call) -> Response:
    """All instances run together, as one batch."""
    instances = await call.apart(lambda: _instances(call))
    parsed = [await _instance(i, instance, call) for i, instance in enumerate(instances)]
    generation = await generate(call.server, [request for _, request in parsed])
    drawn = await generation.collect()
    answers = (list(choices) for _, choices in groupby(drawn, key=lambda choice: choice.request_index))
    texts = [await _prediction(body, choices, call) for (body, _), choices in zip(parsed, answers, strict=True)]
    return Response(VertexAnswer(predictions=texts).model_dump_json(), media_type="application/json")


def _instances(call: Call) -> list[dict[str, Any]]:
    given = call.json.get("instances")
    if isinstance(given, list):
        check_count(len(given), "entries", "instances", call.server.settings.max_queued)
    try:
        return parse(VertexBody, call.json).instances
    except Mismatch as mismatch:
        raise tgi_errors.BodyMismatch(str(mismatch), mismatch.field) from None


async def _instance(
    index: int, instance: dict[str, Any], call: Call
) -> tuple[GenerateRequest | None, TextGenerationRequest]:
    """The request of one instance, and its body when it is TGI's. Raises RequestFailed that names the instance."""
    data = await call.apart(lambda: orjson.dumps(instance))
    part = Call(call.server, call.scope, data, call.request_id, call.received, light=call.light)
    forms = {_KEYS[name] for name in _given(instance)}
    try:
        if forms == {"tgi"}:
            body = await part.apart(lambda: read(GenerateRequest, part))
            check(body, part, streaming=False)
            return body, await internal_request(body, part, streaming=False)
        if forms == {"chat"}:
            given = await part.apart(lambda: openai_requests.read(part, ChatBody))
            request = await openai_requests.chat_request(part, given)
            if request.n != 1:
                raise invalid(f"n must be 1 here, got {request.n}: an instance has one prediction", "n")
            return None, request
    except RequestFailed as error:
        where = f"instances[{index}]: {error.message}"
        raise RequestFailed(error.kind, where, field=error.field, numbers=error.numbers) from None
    raise invalid(f"instances[{index}] must have exactly one of `inputs` and `messages`", "instances")


async def _prediction(body: GenerateRequest | None, choices: list[Choice], call: Call) -> str:
    """The text of an instance's answer, the most likely one of several (`best_of`)."""
    if not all(map(is_complete, choices)):
        raise RequestFailed(ErrorKind.INTERNAL, "Incomplete generation", counted=True)
    best = max(choices, key=lambda choice: choice.mean_logprob) if len(choices) > 1 else choices[0]
    return best.text if body is None else str((await answer(body, [best], call.server.tokenizer))["generated_text"])


def _given(body: Mapping[str, Any]) -> list[str]:
    """Keys that show the dialect of a body. A null counts as absent, except for `inputs`, which TGI reports."""
    return [name for name in _KEYS if name in body and (name == "inputs" or body[name] is not None)]


def _render_error(error: RequestFailed, call: Call) -> Response:
    """Renders an error in the dialect of the body that caused it, and in TGI's when that is unknown."""
    try:
        if call.server.pooled_model is not None:
            render = openai_errors.render_error if "input" in call.json else tei_errors.render_error
            return render(error, call)
        forms = {_KEYS[name] for name in _given(call.json)}
    except RequestFailed:
        forms = set()
    if forms == {"sglang"}:
        return sglang_errors.render_error(error, call)
    if forms and forms <= {"chat", "completion"}:
        return openai_errors.render_error(error, call)
    return tgi_errors.render_error(error, call)
