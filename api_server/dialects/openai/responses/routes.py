"""OpenAI's /v1/responses for text, or for an image: one request, one answer, nothing kept."""

from __future__ import annotations

import orjson
from starlette.responses import Response
from starlette.routing import BaseRoute

from api_server.dialects.openai import requests
from api_server.dialects.openai.errors import render_error
from api_server.dialects.openai.responses import context, image_tool, input
from api_server.dialects.openai.responses.events import Events
from api_server.dialects.openai.responses.rendering import Form, named
from api_server.dialects.openai.responses.schema import InputTokens, ResponseAnswer, ResponseEvent, ResponsesBody
from api_server.dialects.openai.responses.tools import Toolbox
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.errors import RequestFailed
from api_server.generation.generation import generate
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.sse import EventStream
from interfaces import TextGenerationRequest

_RESPONSES = Document(
    "Answer an input",
    "openai",
    body=ResponsesBody,
    answer=ResponseAnswer,
    frame=ResponseEvent,
    example={"input": "What is 2 + 3?", "instructions": "Be brief.", "max_output_tokens": 50},
    errors=dict.fromkeys((400, 404, 413, 429, 500, 503), ErrorAnswer),
)


_INPUT_TOKENS = Document(
    "Tokens of an input, as the model would read it",
    "openai",
    body=ResponsesBody,
    answer=InputTokens,
    example={"input": "What is 2 + 3?", "instructions": "Be brief."},
    errors=dict.fromkeys((400, 404, 413, 429, 500), ErrorAnswer),
)


def routes() -> list[BaseRoute]:
    return [
        endpoint("/v1/responses", responses, _render_error, document=_RESPONSES),
        endpoint("/v1/responses/input_tokens", input_tokens, _render_error, document=_INPUT_TOKENS),
    ]


async def responses(call: Call) -> Response:
    body, tools = await call.apart(lambda: _read(call))
    form = Form(call.request_id, _model(call, body), body, tools, call.server.seal)
    if image_tool.is_chosen(body):
        return await image_tool.answered(call, body, form)
    generation = await generate(call.server, await _request(call, body, tools))
    if body.stream:
        events = Events(form, generation)
        return EventStream(events.frames(), generation.close, events.error_frame)
    (choice,) = await generation.collect()
    return Response(orjson.dumps(form.answer(choice)), media_type="application/json")


async def input_tokens(call: Call) -> Response:
    """Counts the tokens of an input, as the model would read it."""
    body, tools = await call.apart(lambda: _read(call))
    prompt = await call.server.tokenizer.prompt(await _request(call, body, tools), None)
    count = {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}
    return Response(orjson.dumps(count), media_type="application/json")


def _model(call: Call, body: ResponsesBody) -> str:
    return requests.adapter_of(call, body) or call.server.model_name


def _read(call: Call) -> tuple[ResponsesBody, Toolbox]:
    body = requests.read(call, ResponsesBody, input.REFUSED)
    input.check_parts(body)
    # Where an image is chosen, the other tools are not called.
    return body, Toolbox() if image_tool.is_chosen(body) else Toolbox.of(body.tools)


async def _request(call: Call, body: ResponsesBody, tools: Toolbox) -> TextGenerationRequest:
    await input.load_parts(call.server, body)
    seal = call.server.seal
    request = await call.apart(lambda: requests.responses_request(call, body, input.messages(body, seal), tools))
    return await context.managed(call.server, body, request)


def _render_error(error: RequestFailed, call: Call) -> Response:
    return render_error(named(error), call)
