"""POST /classify and /pooling in vLLM's form, on a body with `input` or `messages`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response

from api_server.dialects.openai import conversation, texts
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.errors import invalid
from api_server.pooling import rendering
from api_server.pooling.pooling import Ask, Pooled, name_of_model, pool_texts
from api_server.web.endpoint import Call, Document
from interfaces import PoolingTask

ERRORS = dict.fromkeys((400, 404, 413, 415, 429, 500, 503), ErrorAnswer)


class ClassifyBody(conversation.InputOrMessages):
    use_activation: bool | None = Field(None, description="false gives logits instead of probabilities")
    activation: bool | None = Field(None, description="As use_activation")
    softmax: bool | None = Field(None, description="As use_activation")


class Classification(BaseModel):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyAnswer(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: texts.TextsUsage


CLASSIFY = Document(
    "The most likely label of each text",
    "vllm",
    body=ClassifyBody,
    answer=ClassifyAnswer,
    example={"input": ["I like it", "I do not"]},
    errors=ERRORS,
    pools=True,
)


class PoolingBody(ClassifyBody):
    # vLLM's names of the tasks.
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = Field(
        None, description="What is made of each text; default: what the model is for"
    )
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian float32")
    dimensions: int | None = Field(None, ge=1, description="Cut vectors to so many numbers, and give them length 1")
    normalize: bool | None = Field(None, description="As use_activation, for vectors")
    prompt_name: str | None = Field(
        None, description="A prompt of the checkpoint (query, document) to put before texts"
    )


class PoolingData(BaseModel):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PoolingAnswer(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingData]
    usage: texts.TextsUsage


POOLING = Document(
    "What the model makes of texts: vectors or scores, of texts or of their tokens",
    "vllm",
    body=PoolingBody,
    answer=PoolingAnswer,
    example={"input": ["a switchyard", "a train"]},
    errors=ERRORS,
    pools=True,
)

_TASKS = {
    "embed": PoolingTask.EMBED,
    "token_embed": PoolingTask.EMBED_TOKENS,
    "classify": PoolingTask.CLASSIFY,
    "token_classify": PoolingTask.CLASSIFY_TOKENS,
}
# The task of a body that names none, by the server's task.
_USUAL = {
    "embed": PoolingTask.EMBED,
    "embed_tokens": PoolingTask.EMBED_TOKENS,
    "rerank": PoolingTask.CLASSIFY,
    "classify": PoolingTask.CLASSIFY,
    "classify_tokens": PoolingTask.CLASSIFY_TOKENS,
}


async def classify(call: Call) -> Response:
    """POST /classify with `input` or `messages`."""
    body = await call.apart(lambda: conversation.read(call, ClassifyBody))
    pooled = await _pooled(call, body, Ask(task=PoolingTask.CLASSIFY, activate=_activated(body)))
    labels = call.server.engine.model.labels
    rows = pooled.rows
    best = rows.argmax(axis=1).tolist()
    items = (
        {"index": i, "label": labels[best[i]] if best[i] < len(labels) else None, "probs": row, "num_classes": len(row)}
        for i, row in enumerate(rows)
    )
    return await rendering.answer(call, items, rows.size, "data", envelope(call, "classify", pooled.tokens))


async def pooling(call: Call) -> Response:
    """POST /pooling."""
    body = await call.apart(lambda: conversation.read(call, PoolingBody))
    task = _TASKS[body.task] if body.task is not None else _USUAL.get(call.server.task)
    if task is None:
        raise invalid(f"/pooling has no form for the values of this model (task {call.server.task}): ask /embed_sparse")
    activated = _activated(body) and body.normalize is not False
    ask = Ask(task=task, dimensions=body.dimensions, normalize=activated, activate=activated)
    pooled = await _pooled(call, body, ask, body.prompt_name)
    of_tokens = task in (PoolingTask.EMBED_TOKENS, PoolingTask.CLASSIFY_TOKENS)
    items = _pooling_items(pooled, of_tokens, body.encoding_format)
    size = pooled.values.array.size
    return await rendering.answer(call, items, size, "data", envelope(call, "pool", pooled.tokens))


def _pooling_items(pooled: Pooled, of_tokens: bool, encoding_format: str) -> Iterator[dict[str, Any]]:
    encoded = rendering.encoder(encoding_format)
    for i, rows in enumerate(pooled.values.texts()):
        yield {"index": i, "object": "pooling", "data": encoded(rows if of_tokens else rows[0])}


async def _pooled(call: Call, body: ClassifyBody, ask: Ask, prompt_name: str | None = None) -> Pooled:
    items, reading = await conversation.read_items(call, body, prompt_name)
    return await pool_texts(call, items, reading, ask)


def _activated(body: ClassifyBody) -> bool:
    return all(value is not False for value in (body.use_activation, body.activation, body.softmax))


def envelope(call: Call, prefix: str, tokens: int) -> dict[str, Any]:
    """The fields of an answer beside its data."""
    return {
        "id": f"{prefix}-{call.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": name_of_model(call),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
