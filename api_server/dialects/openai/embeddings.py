"""POST /v1/embeddings: OpenAI's fields, and those that vLLM's clients add."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.body import item_limits
from api_server.body.item_limits import Turns
from api_server.chat import documents
from api_server.chat.messages import chat_messages
from api_server.dialects.openai import texts
from api_server.dialects.openai.errors import render_error
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.errors import invalid
from api_server.pooling import rendering
from api_server.pooling.pooling import Ask, Pooled, pool_texts
from api_server.pooling.reading import MOST_TEXTS
from api_server.web.endpoint import Call, Document, endpoint
from interfaces import PoolingTask, RequestID, TextGenerationRequest


class EmbeddingsBody(texts.TextsBody):
    input: texts.Input | None = Field(
        None, description=f"A text, its token ids, or a list of either, at most {MOST_TEXTS}; none of them empty"
    )
    messages: Annotated[Turns, Field(min_length=1)] | None = Field(
        None, description="Instead of input: a conversation, whose form the model's chat template gives"
    )
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian float32")
    dimensions: int | None = Field(None, ge=1, description="Cut vectors to so many numbers, and give them length 1")
    prompt_name: str | None = Field(
        None, description="A prompt of the checkpoint (query, document) to put before texts"
    )
    normalize: bool | None = Field(None, description="false leaves the length of vectors as it is")
    use_activation: bool | None = Field(None, description="As normalize")
    add_generation_prompt: bool | None = Field(None, description="For messages: open the assistant's turn")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="For messages: variables of the template")


class EmbeddingObject(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: texts.TextsUsage
    id: str
    created: int


_DOCUMENT = Document(
    "Vectors of texts",
    "openai",
    body=EmbeddingsBody,
    answer=EmbeddingsAnswer,
    example={"input": ["a switchyard", "a train"]},
    errors=dict.fromkeys((400, 404, 413, 415, 429, 500, 503), ErrorAnswer),
    pools=True,
)


def route() -> Route:
    return endpoint("/v1/embeddings", embeddings, render_error, document=_DOCUMENT)


async def embeddings(call: Call) -> Response:
    body = await call.apart(lambda: _read(call))
    given = body.input
    items = texts.items_of(given) if given is not None else [await _conversation(call, body)]
    field = "messages" if given is None else "input"
    reading = texts.reading_of(body, field, given is not None and texts.is_list(given), body.prompt_name)
    wanted = [value for value in (body.normalize, body.use_activation) if value is not None]
    ask = Ask(task=PoolingTask.EMBED, dimensions=body.dimensions, normalize=all(wanted))
    pooled = await pool_texts(call, items, reading, ask)
    return await _answer(call, pooled, body.encoding_format)


def _read(call: Call) -> EmbeddingsBody:
    body = texts.read(call, EmbeddingsBody, "input")
    if (body.input is None) == (body.messages is None):
        raise invalid("exactly one of input and messages must be given", "input")
    return body


async def _conversation(call: Call, body: EmbeddingsBody) -> list[int]:
    """The token ids of a conversation."""
    await call.apart(lambda: item_limits.check_parts(body.messages or (), "messages"))
    await documents.load(call.server.url_fetcher, body.messages or (), "messages", documents.file_part)
    messages = await call.apart(lambda: chat_messages(body.messages or ()))
    request = TextGenerationRequest(
        RequestID(call.request_id),
        messages=messages,
        chat_template_options=body.chat_template_kwargs or {},
        add_generation_prompt=bool(body.add_generation_prompt),
        add_special_tokens=body.add_special_tokens if "add_special_tokens" in body.model_fields_set else None,
    )
    ids: list[int] = (await call.server.tokenizer.prompt(request, None)).tokens.tolist()
    return ids


async def _answer(call: Call, pooled: Pooled, encoding_format: str) -> Response:
    encoded = rendering.encoder(encoding_format)
    items = ({"object": "embedding", "index": i, "embedding": encoded(row)} for i, row in enumerate(pooled.rows))
    fields = {
        "id": f"embd-{call.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": call.server.model_name,
        "usage": {"prompt_tokens": pooled.tokens, "total_tokens": pooled.tokens},
    }
    return await rendering.answer(call, items, pooled.rows.size, "data", fields)
