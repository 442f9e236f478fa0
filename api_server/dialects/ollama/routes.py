"""Ollama's endpoints that generate: each reads its body, calls `generate`, and writes the answer or the lines."""

from __future__ import annotations

from functools import partial

from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from api_server.dialects.ollama import embeddings, management, models, rendering, requests
from api_server.dialects.ollama.errors import error_line, render_error
from api_server.dialects.ollama.lines import MEDIA_TYPE, line
from api_server.dialects.ollama.rendering import Form, chat_form, generate_form
from api_server.dialects.ollama.schema import ChatAnswer, ChatBody, ErrorAnswer, GenerateAnswer, GenerateBody
from api_server.dialects.openai.logprobs import LogprobWriter
from api_server.dialects.plain_errors import STATUSES
from api_server.errors import invalid
from api_server.generation.generation import generate
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import json_response
from api_server.web.sse import EventStream
from interfaces import TextGenerationRequest

TAG = "ollama"

_ERRORS = dict.fromkeys(STATUSES, ErrorAnswer)
_CHAT = Document(
    "Answer a conversation",
    TAG,
    body=ChatBody,
    answer=ChatAnswer,
    frame=ChatAnswer,
    frame_type=MEDIA_TYPE,
    example={"messages": [{"role": "user", "content": "What is 2 + 3?"}], "stream": False},
    errors=_ERRORS,
    description="Streams lines of JSON unless `stream` is false.",
)
_GENERATE = Document(
    "Answer a prompt",
    TAG,
    body=GenerateBody,
    answer=GenerateAnswer,
    frame=GenerateAnswer,
    frame_type=MEDIA_TYPE,
    example={"prompt": "What is 2 + 3?", "stream": False, "options": {"num_predict": 50}},
    errors=_ERRORS,
    description="Streams lines of JSON unless `stream` is false.",
)


def routes() -> list[Route]:
    return [
        endpoint("/api/chat", chat, render_error, document=_CHAT, form=requests.FORM),
        endpoint("/api/generate", generate_text, render_error, document=_GENERATE, form=requests.FORM),
        *embeddings.routes(),
        *models.routes(),
        *management.routes(),
    ]


def is_at_home(call: Call) -> bool:
    """True for a request at the port that is for clients of Ollama alone, and that does not want a page."""
    own = call.server.settings.ollama_port
    asked = call.scope.get("server")
    wants_page = "text/html" in call.headers.get("accept", "")
    return bool(own) and asked is not None and asked[1] == own and not wants_page


def greeting() -> Response:
    """The answer of Ollama's front page, by which clients know it."""
    return PlainTextResponse("Ollama is running")


async def chat(call: Call) -> Response:
    """POST /api/chat."""
    body = await call.apart(lambda: requests.read(call, ChatBody))
    if not body.messages:
        return _loaded(call, body, chat_form)
    return await _answer(call, body, await requests.chat_request(call, body), chat_form)


async def generate_text(call: Call) -> Response:
    """POST /api/generate."""
    body = await call.apart(lambda: requests.read(call, GenerateBody))
    if not body.prompt and not body.images:
        return _loaded(call, body, generate_form)
    return await _answer(call, body, await requests.generate_request(call, body), generate_form)


async def _answer(call: Call, body: ChatBody | GenerateBody, request: TextGenerationRequest, form: Form) -> Response:
    streams = body.stream is not False
    if streams and call.scope["state"].get("resume") is not None:
        where = "x-resume-stream"
        raise invalid(f"{where}: lines of JSON cannot be resumed: ask /v1/chat/completions, or send no {where}", where)
    model = request.lora_name or call.server.model_name
    writer = LogprobWriter(call.server.tokenizer, body.top_logprobs or 0) if request.token_details else None
    context = isinstance(body, GenerateBody) and not body.raw
    generation = await generate(call.server, request)
    if not streams:
        (choice,) = await generation.collect()
        return json_response(rendering.answer(model, choice, form, writer, context))
    return EventStream(
        rendering.lines(model, generation, form, writer, context),
        generation.close,
        error_line,
        media_type=MEDIA_TYPE,
        keep_alive=partial(rendering.keep_alive_line, model, form),
    )


def _loaded(call: Call, body: ChatBody | GenerateBody, form: Form) -> Response:
    model = requests.adapter_of(call) or call.server.model_name
    call.server.check_family(False)
    answer = rendering.loaded(model, form, body.keep_alive)
    return json_response(answer) if body.stream is False else Response(line(answer), media_type=MEDIA_TYPE)
