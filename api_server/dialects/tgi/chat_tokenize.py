"""POST /chat_tokenize: the rendered chat template, as text and as tokens with their places in it.

The body is that of /v1/chat/completions and is read by the same code, so the answer is the prompt that route would use.
"""

from __future__ import annotations

from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.openai import requests as openai
from api_server.dialects.openai.schema import ChatBody
from api_server.dialects.tgi.errors import render_error
from api_server.dialects.tgi.schema import ErrorResponse, SimpleToken
from api_server.web.endpoint import Call, Document, endpoint


class ChatTokenizeResponse(BaseModel):
    tokenize_response: list[SimpleToken]
    templated_text: str


_DOCUMENT = Document(
    summary="The prompt that the chat template makes of messages",
    tag="tgi",
    body=ChatBody,
    answer=ChatTokenizeResponse,
    example={"messages": [{"role": "user", "content": "What is 2 + 3?"}]},
    errors=dict.fromkeys((400, 404, 413, 422), ErrorResponse),
)


def route() -> Route:
    return endpoint("/chat_tokenize", chat_tokenize, render_error, document=_DOCUMENT)


async def chat_tokenize(call: Call) -> Response:
    """POST /chat_tokenize. The template writes the special tokens itself, so the tokenizer adds none."""
    body = await call.apart(lambda: openai.read(call, ChatBody))
    request = await openai.chat_request(call, body)
    prompt = await call.server.tokenizer.prompt(request, call.server.max_model_len)
    text = prompt.text or ""
    spans = await call.server.tokenizer.spans(text, add_special_tokens=False, parts=prompt.parts)
    tokens = [SimpleToken(id=s.id, text=s.text, start=s.start, stop=s.stop) for s in spans]
    answer = ChatTokenizeResponse(tokenize_response=tokens, templated_text=text)
    return Response(answer.model_dump_json(), media_type="application/json")
