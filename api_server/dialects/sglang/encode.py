"""SGLang's POST /encode and /classify with `text` or `input_ids`, and its /v1/rerank."""

from __future__ import annotations

import time
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.body import unknown_fields
from api_server.body.unknown_fields import ALWAYS, Refusals
from api_server.body.validation import Mismatch, parse
from api_server.dialects.cohere.rerank import check_documents
from api_server.dialects.openai.texts import check_input
from api_server.dialects.sglang.errors import ERROR_STATUSES, render_error
from api_server.dialects.sglang.schema import ErrorResponse, Integers, Texts
from api_server.errors import invalid
from api_server.pooling import rendering
from api_server.pooling.pooling import Ask, pool_texts
from api_server.pooling.ranking import scores
from api_server.pooling.reading import Item, Reading
from api_server.web.endpoint import Call, Document, endpoint
from interfaces import FIRST_VERSION, PoolingTask

B = TypeVar("B", bound=BaseModel)

_NO_TEXT = "exactly one of text and input_ids must be given"

_REFUSED: Refusals = {
    "image_data": ("images", ALWAYS),
    "audio_data": ("audio", ALWAYS),
    "video_data": ("video", ALWAYS),
    "input_embeds": ("vectors in place of tokens", ALWAYS),
    "lora_path": ("adapters", ALWAYS),
}
# Known fields that change no answer here.
_WITHOUT_EFFECT = frozenset({"rid", "sampling_params", "is_cross_encoder_request", "log_metrics", "model"})


class EncodeRequest(BaseModel):
    """Texts or token ids, singly or in a list; a list is answered with a list."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    text: str | Texts | None = None
    input_ids: Integers | Annotated[list[Integers], Field(fail_fast=True)] | None = None
    dimensions: int | None = Field(None, ge=1, description="Cut vectors to so many numbers, and give them length 1")


class EncodeMeta(BaseModel):
    id: str
    prompt_tokens: int
    weight_version: str
    e2e_latency: float


class EncodeResponse(BaseModel):
    """A vector; from /classify the labels' probabilities."""

    embedding: list[float]
    meta_info: EncodeMeta


class RerankRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    query: str = Field(min_length=1)
    documents: Annotated[list[str], Field(fail_fast=True, min_length=1)]
    instruct: str | None = Field(None, description="The task, for a decoder that takes one")
    top_n: int | None = Field(None, ge=0, description="Answer with so many of the best; default all")
    return_documents: bool = True


class RerankMeta(BaseModel):
    id: str
    prompt_tokens: int


class Ranked(BaseModel):
    score: float
    document: str | None = None
    index: int
    meta_info: RerankMeta


_ERRORS = dict.fromkeys(ERROR_STATUSES, ErrorResponse)
_ENCODE = Document(
    "Vectors of texts",
    "sglang",
    body=EncodeRequest,
    answer=EncodeResponse,
    example={"text": "a switchyard"},
    errors=_ERRORS,
    description="A list of texts is answered with a list.",
    pools=True,
)
CLASSIFY = Document(
    "Probabilities of each text's labels",
    "sglang",
    body=EncodeRequest,
    answer=EncodeResponse,
    example={"text": "I like it"},
    errors=_ERRORS,
    description="A list of texts is answered with a list.",
    pools=True,
)
RERANK = Document(
    "Scores of documents for a query, the best first",
    "sglang",
    body=RerankRequest,
    answer=Ranked,
    listed=True,
    example={"query": "What is a train?", "documents": ["Cars in a row.", "A fruit."]},
    errors=_ERRORS,
    description="A body without `model`, or with `instruct`, is SGLang's.",
    pools=True,
)


def route() -> Route:
    return endpoint("/encode", encode, render_error, methods=("POST", "PUT"), document=_ENCODE)


async def encode(call: Call) -> Response:
    """POST|PUT /encode."""
    return await _encoded(call, PoolingTask.EMBED)


async def classify(call: Call) -> Response:
    """POST|PUT /classify with `text` or `input_ids`."""
    return await _encoded(call, PoolingTask.CLASSIFY)


async def rerank(call: Call) -> Response:
    """POST /v1/rerank."""
    check_documents(call.json.get("documents"))
    body = await call.apart(lambda: _read(call, RerankRequest))
    reading = Reading(field="documents", remedy="a body with `model`, whose documents are cut")
    pairs = [(body.query, document) for document in body.documents]
    found = await scores(call, pairs, reading, instruction=body.instruct)
    values = found.values.tolist()
    lengths = found.lengths.tolist()
    answer = []
    for i in found.order(body.top_n):
        ranked: dict[str, Any] = {"score": values[i], "document": body.documents[i], "index": i}
        if not body.return_documents:
            del ranked["document"]
        answer.append(ranked | {"meta_info": {"id": call.request_id, "prompt_tokens": lengths[i]}})
    return Response(orjson.dumps(answer), media_type="application/json")


async def _encoded(call: Call, task: PoolingTask) -> Response:
    field, items, listed = await call.apart(lambda: _items(call))
    ask = Ask(task=task, dimensions=call.json.get("dimensions"))
    pooled = await pool_texts(call, items, Reading(field=field, listed=listed, remedy="fewer tokens"), ask)
    seconds = time.monotonic() - call.received
    lengths = pooled.batch.lengths.tolist()
    answers = (
        {
            "embedding": row,
            "meta_info": {
                "id": call.request_id if not listed else f"{call.request_id}-{i}",
                "prompt_tokens": lengths[i],
                "weight_version": FIRST_VERSION,
                "e2e_latency": seconds,
            },
        }
        for i, row in enumerate(pooled.rows)
    )
    if listed:
        return await rendering.answer(call, answers, pooled.rows.size)
    return Response(rendering.json_of(next(answers)), media_type="application/json")


def _items(call: Call) -> tuple[str, list[Item], bool]:
    """The field that has the texts, the texts, and whether they are a list."""
    given = [name for name in ("text", "input_ids") if call.json.get(name) is not None]
    if len(given) != 1:
        raise invalid(_NO_TEXT, "text")
    field = given[0]
    check_input(call.json[field], field)
    body = _read(call, EncodeRequest)
    value: Any = getattr(body, field)
    listed = isinstance(value, list) and not isinstance(value[0], int)
    return field, list(value) if listed else [value], listed


def _read(call: Call, model: type[B]) -> B:
    unknown_fields.check(call.json, model, _REFUSED, _WITHOUT_EFFECT)
    try:
        return parse(model, call.json)
    except Mismatch as mismatch:
        raise invalid(str(mismatch), mismatch.field or None) from None
