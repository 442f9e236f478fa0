"""OpenAI's /v1/responses for text: one request, one answer, nothing kept."""

from __future__ import annotations

import orjson
from starlette.responses import Response
from starlette.routing import BaseRoute

from api_server.dialects.openai import requests, responses_input
from api_server.dialects.openai.errors import render_error
from api_server.dialects.openai.responses_events import Events
from api_server.dialects.openai.responses_rendering import Form, named
from api_server.dialects.openai.responses_schema import ResponseAnswer, ResponseEvent, ResponsesBody
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.endpoint import Call, Document, endpoint
from api_server.errors import RequestFailed
from api_server.generation import generate
from api_server.sse import EventStream

_RESPONSES = Document(
    "Answer an input",
    "openai",
    body=ResponsesBody,
    answer=ResponseAnswer,
    frame=ResponseEvent,
    example={"input": "What is 2 + 3?", "instructions": "Be brief.", "max_output_tokens": 50},
    errors=dict.fromkeys((400, 404, 413, 429, 500, 503), ErrorAnswer),
)


def routes() -> list[BaseRoute]:
    return [endpoint("/v1/responses", responses, _render_error, document=_RESPONSES)]


async def responses(call: Call) -> Response:
    body = requests.read(call, ResponsesBody, responses_input.REFUSED)
    responses_input.check(call.json)
    form = Form(call.request_id, call.server.model_name, body)
    await responses_input.load_documents(call.server, body)
    generation = await generate(call.server, requests.responses_request(call, body, responses_input.messages(body)))
    if body.stream:
        events = Events(form, generation)
        return EventStream(events.frames(), generation.close, events.error_frame)
    (choice,) = await generation.collect()
    return Response(orjson.dumps(form.answer(choice)), media_type="application/json")


def _render_error(error: RequestFailed, call: Call) -> Response:
    return render_error(named(error), call)
