"""POST /tokenize with `prompt` or `messages`, as SGLang and vLLM have it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api_server.body import Mismatch, parse
from api_server.chat_messages import chat_messages
from api_server.dialects.sglang.schema import ErrorResponse
from api_server.endpoint import Call, Document
from api_server.errors import invalid
from interfaces.request_id import RequestID
from interfaces.requests import TextGenerationRequest

MAX_PROMPTS = 1024


class TokenizeRequest(BaseModel):
    """Exactly one of `prompt` and `messages`; a list of prompts is answered with lists."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    prompt: str | list[str] | None = Field(None, max_length=1 << 26)
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
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


async def tokenize(call: Call) -> Response:
    """Answers with the ids, singly or as lists."""
    try:
        body = parse(TokenizeRequest, call.json)
    except Mismatch as mismatch:
        raise invalid(str(mismatch), mismatch.field) from None
    prompts: list[str | None] = list(body.prompt) if isinstance(body.prompt, list) else [body.prompt]
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"prompt has {len(prompts)} texts; at most {MAX_PROMPTS} are possible in one request", "prompt")
    ids = [await _ids(prompt, body, call) for prompt in prompts]
    listed = isinstance(body.prompt, list)
    answer = TokenizeResponse(
        tokens=ids if listed else ids[0],
        count=[len(each) for each in ids] if listed else len(ids[0]),
        max_model_len=call.server.max_model_len,
    )
    return Response(answer.model_dump_json(), media_type="application/json")


async def _ids(prompt: str | None, body: TokenizeRequest, call: Call) -> list[int]:
    try:
        request = TextGenerationRequest(
            request_id=RequestID(call.request_id),
            prompt=prompt,
            messages=chat_messages(body.messages or ()),
            tools=body.tools,
            chat_template_options=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=body.add_special_tokens,
        )
    except ValueError as error:
        raise invalid(str(error)) from None
    found: list[int] = (await call.server.tokenizer.prompt(request, None)).tokens.tolist()
    return found
