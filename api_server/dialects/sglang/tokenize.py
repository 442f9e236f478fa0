"""POST /tokenize with `prompt` or `messages`, as in SGLang and vLLM, and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.body.item_limits import MAX_TEXT, Tools, Turns, check_count, check_parts
from api_server.chat import documents, images, sounds, videos
from api_server.chat.media_parts import of_messages
from api_server.chat.messages import chat_messages
from api_server.dialects.sglang.errors import render_error
from api_server.dialects.sglang.schema import ErrorResponse, Integers
from api_server.errors import invalid
from api_server.text.tokenizer import refuse_long
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import read_json
from interfaces import RequestID, TextGenerationRequest, TextGenerationRequestMessage

MAX_PROMPTS = 1024


class TokenizeRequest(BaseModel):
    """A request with exactly one of `prompt` and `messages`; a list of prompts is answered with lists."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    prompt: str | list[str] | None = None
    messages: Turns | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = Field(None, description="Default: for a prompt yes, after a chat template no")


class TokenizeResponse(BaseModel):
    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int | None = Field(description="Null until the model is loaded")


TOKENIZE = Document(
    summary="Token ids of a prompt or of messages",
    tag="sglang",
    body=TokenizeRequest,
    answer=TokenizeResponse,
    example={"prompt": "My name is Olivier and I"},
    errors={400: ErrorResponse},
)


class DetokenizeRequest(BaseModel):
    """Token ids to decode. A list of lists is answered with a list of texts."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    tokens: Integers | Annotated[list[Integers], Field(fail_fast=True)]
    skip_special_tokens: bool = True


class DetokenizeResponse(BaseModel):
    text: str | list[str]


DETOKENIZE = Document(
    summary="Text of token ids",
    tag="sglang",
    body=DetokenizeRequest,
    answer=DetokenizeResponse,
    example={"tokens": [12, 7, 5]},
    errors={400: ErrorResponse},
)


def routes() -> list[Route]:
    """The routes of this module; `/tokenize`, shared with TGI's dialect, is elsewhere."""
    return [
        endpoint("/v1/tokenize", tokenize, render_error, document=TOKENIZE),
        endpoint("/detokenize", detokenize, render_error, document=DETOKENIZE),
        endpoint("/v1/detokenize", detokenize, render_error, document=DETOKENIZE),
    ]


async def detokenize(call: Call) -> Response:
    """Answers with the text, singly or as a list."""
    body, lists, listed = await call.apart(lambda: _lists(call))
    texts = [await call.server.tokenizer.decode(ids, body.skip_special_tokens) for ids in lists]
    answer = DetokenizeResponse(text=texts if listed else texts[0])
    return Response(answer.model_dump_json(), media_type="application/json")


def _lists(call: Call) -> tuple[DetokenizeRequest, list[list[int]], bool]:
    given = call.json.get("tokens")
    listed = isinstance(given, list) and bool(given) and isinstance(given[0], list)
    if isinstance(given, list):
        inner = [each for each in given if isinstance(each, list)] if listed else [given]
        check_count(len(inner), "lists", "tokens", MAX_PROMPTS)
        check_count(sum(map(len, inner)), "tokens", "tokens", MAX_TEXT)
    body = read_json(call, DetokenizeRequest)
    lists: list[Any] = list(body.tokens) if listed else [body.tokens]
    for ids in lists:
        call.server.tokenizer.check_ids(ids, "tokens")
    return body, lists, listed


async def tokenize(call: Call) -> Response:
    """Answers with the ids, singly or as lists."""
    body = await call.apart(lambda: _read_tokenize(call))
    prompts: list[str | None] = list(body.prompt) if isinstance(body.prompt, list) else [body.prompt]
    refuse_long(sum(len(prompt or "") for prompt in prompts), "prompt")
    await documents.load(call.server.url_fetcher, body.messages or (), "messages", documents.file_part)
    await images.load(call.server, body.messages or (), "messages", images.openai_part)
    await videos.load(call.server, body.messages or (), "messages")
    await sounds.load(call.server, body.messages or (), "messages")
    messages = await call.apart(lambda: chat_messages(body.messages or ()))
    ids = [await _ids(prompt, messages, body, call) for prompt in prompts]
    listed = isinstance(body.prompt, list)
    answer = TokenizeResponse(
        tokens=ids if listed else ids[0],
        count=[len(each) for each in ids] if listed else len(ids[0]),
        max_model_len=call.server.max_model_len,
    )
    return Response(answer.model_dump_json(), media_type="application/json")


def _read_tokenize(call: Call) -> TokenizeRequest:
    given = call.json.get("prompt")
    if isinstance(given, list):
        check_count(len(given), "texts", "prompt", MAX_PROMPTS)
    body = read_json(call, TokenizeRequest)
    if isinstance(body.prompt, list) and body.messages:
        raise invalid("prompt and messages exclude each other: give one of them", "prompt")
    check_parts(body.messages or (), "messages")
    return body


async def _ids(
    prompt: str | None, messages: list[TextGenerationRequestMessage], body: TokenizeRequest, call: Call
) -> list[int]:
    try:
        request = TextGenerationRequest(
            request_id=RequestID(call.request_id),
            prompt=prompt,
            messages=messages,
            **of_messages(messages),
            tools=body.tools,
            chat_template_options=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=body.add_special_tokens,
        )
    except ValueError as error:
        raise invalid(str(error)) from None
    found: list[int] = (await call.server.tokenizer.prompt(request, None)).tokens.tolist()
    return found
