"""POST /v1/embeddings: OpenAI's fields, and those that vLLM's clients add."""

from __future__ import annotations

import time
from typing import Literal

from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.openai import conversation, texts
from api_server.dialects.openai.errors import render_error
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.pooling import rendering
from api_server.pooling.pooling import Ask, Pooled, name_of_model, pool_texts
from api_server.web.endpoint import Call, Document, endpoint
from interfaces import PoolingTask


class EmbeddingsBody(conversation.InputOrMessages):
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian float32")
    dimensions: int | None = Field(None, ge=1, description="Cut vectors to so many numbers, and give them length 1")
    prompt_name: str | None = Field(
        None, description="A prompt of the checkpoint (query, document) to put before texts"
    )
    normalize: bool | None = Field(None, description="false leaves the length of vectors as it is")
    use_activation: bool | None = Field(None, description="As normalize")


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
    body = await call.apart(lambda: conversation.read(call, EmbeddingsBody))
    items, reading = await conversation.read_items(call, body, body.prompt_name)
    wanted = [value for value in (body.normalize, body.use_activation) if value is not None]
    ask = Ask(task=PoolingTask.EMBED, dimensions=body.dimensions, normalize=all(wanted))
    pooled = await pool_texts(call, items, reading, ask)
    return await _answer(call, pooled, body.encoding_format)


async def _answer(call: Call, pooled: Pooled, encoding_format: str) -> Response:
    encoded = rendering.encoder(encoding_format)
    items = ({"object": "embedding", "index": i, "embedding": encoded(row)} for i, row in enumerate(pooled.rows))
    fields = {
        "id": f"embd-{call.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": name_of_model(call),
        "usage": {"prompt_tokens": pooled.tokens, "total_tokens": pooled.tokens},
    }
    return await rendering.answer(call, items, pooled.rows.size, "data", fields)
