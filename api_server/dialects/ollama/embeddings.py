"""POST /api/embed and the older /api/embeddings: vectors of texts from a model that embeds."""

from __future__ import annotations

import time

import orjson
from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.ollama import requests
from api_server.dialects.ollama.errors import render_error
from api_server.dialects.ollama.schema import EmbedAnswer, EmbedBody, ErrorAnswer, OldEmbedAnswer, OldEmbedBody
from api_server.dialects.plain_errors import STATUSES
from api_server.errors import invalid
from api_server.pooling import rendering
from api_server.pooling.pooling import Ask, name_of_model, pool_texts
from api_server.pooling.reading import Reading
from api_server.web.endpoint import Call, Document, endpoint
from interfaces import PoolingTask

_ERRORS = dict.fromkeys(STATUSES, ErrorAnswer)
_EMBED = Document(
    "Vectors of texts",
    "ollama",
    body=EmbedBody,
    answer=EmbedAnswer,
    example={"input": ["a switchyard", "a train"]},
    errors=_ERRORS,
    pools=True,
)
_OLD_EMBED = Document(
    "The vector of a text; its length is as the model makes it",
    "ollama",
    body=OldEmbedBody,
    answer=OldEmbedAnswer,
    example={"prompt": "a switchyard"},
    errors=_ERRORS,
    pools=True,
)

_REMEDY = "truncate: true, which cuts it"


def routes() -> list[Route]:
    return [
        endpoint("/api/embed", embed, render_error, document=_EMBED, form=requests.FORM),
        endpoint("/api/embeddings", old_embed, render_error, document=_OLD_EMBED, form=requests.FORM),
    ]


async def embed(call: Call) -> Response:
    """POST /api/embed."""
    body = await call.apart(lambda: requests.read(call, EmbedBody))
    requests.adapter_of(call)
    given = body.input
    if given is None:
        raise invalid("input is missing: give a text, or a list of texts", "input")
    texts = [given] if isinstance(given, str) else given
    if "" in texts:
        where = f"input[{texts.index('')}]" if texts is given else "input"
        raise invalid(f"{where} must not be empty: leave empty texts out", "input")
    reading = Reading(truncate=body.truncate is not False, remedy=_REMEDY, listed=isinstance(given, list))
    pooled = await pool_texts(call, texts, reading, Ask(task=PoolingTask.EMBED, dimensions=body.dimensions))
    fields = {
        "model": name_of_model(call),
        "total_duration": max(1, round((time.monotonic() - call.received) * 1e9)),
        "load_duration": 1,
        "prompt_eval_count": pooled.tokens,
    }
    encoded = rendering.encoder("float")
    return await rendering.answer(call, map(encoded, pooled.rows), pooled.rows.size, "embeddings", fields)


async def old_embed(call: Call) -> Response:
    """POST /api/embeddings."""
    body = await call.apart(lambda: requests.read(call, OldEmbedBody))
    requests.adapter_of(call)
    if not body.prompt:
        return Response(orjson.dumps({"embedding": []}), media_type="application/json")
    reading = Reading(field="prompt", truncate=True, listed=False)
    pooled = await pool_texts(call, [body.prompt], reading, Ask(task=PoolingTask.EMBED, normalize=False))
    return Response(rendering.json_of({"embedding": pooled.rows[0]}), media_type="application/json")
