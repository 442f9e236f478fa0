"""POST /score in vLLM's form: the score of each pair of texts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response

from api_server.dialects.openai import texts
from api_server.dialects.vllm.texts import ERRORS, envelope
from api_server.errors import invalid
from api_server.pooling import rendering
from api_server.pooling.ranking import scores
from api_server.pooling.reading import MOST_TEXTS
from api_server.web.endpoint import Call, Document

Texts = str | Annotated[list[str], Field(fail_fast=True)]

# The two sides of a pair, under the names of vLLM's releases; the newest first.
NAMES = (("queries", "documents"), ("data_1", "data_2"), ("text_1", "text_2"))


class ScoreBody(texts.TextsBody):
    """One text beside many, or as many on one side as on the other."""

    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = Field(None, description="Older name of queries")
    data_2: Texts | None = Field(None, description="Older name of documents")
    text_1: Texts | None = Field(None, description="Oldest name of queries")
    text_2: Texts | None = Field(None, description="Oldest name of documents")
    use_activation: bool | None = Field(None, description="false gives logits instead of probabilities")


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: texts.TextsUsage


SCORE = Document(
    "The score of each pair of texts",
    "vllm",
    body=ScoreBody,
    answer=ScoreAnswer,
    example={"queries": "What is a train?", "documents": ["Cars in a row.", "A fruit."]},
    errors=ERRORS,
    description="A reranker scores pairs; a model that makes vectors of texts gives their cosine.",
    pools=True,
)


async def score(call: Call) -> Response:
    """POST /score."""
    body = await call.apart(lambda: texts.read(call, ScoreBody, "documents"))
    pairs, (queries, documents) = _pairs(body)
    reading = texts.reading_of(body, documents)
    found = await scores(call, pairs, reading, raw=body.use_activation is False, queries=queries)
    items = ({"index": i, "object": "score", "score": value} for i, value in enumerate(found.values.tolist()))
    return await rendering.answer(call, items, len(pairs), "data", envelope(call, "score", found.tokens))


def _pairs(body: ScoreBody) -> tuple[list[tuple[str, str]], tuple[str, str]]:
    """The pairs, and the fields that have their first and second texts. Raises RequestFailed."""
    given = [names for names in NAMES if any(getattr(body, name) is not None for name in names)]
    if len(given) != 1 or any(getattr(body, name) is None for name in given[0]):
        raise invalid("give the texts as queries and documents, each a text or a list of texts", "queries")
    first, second = given[0]
    firsts, seconds = (_listed(getattr(body, name)) for name in given[0])
    texts.check_input(firsts, first)
    texts.check_input(seconds, second)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise invalid(
            f"{first} must be one text, or as many as the {len(seconds)} of {second}, got {len(firsts)}; at most "
            f"{MOST_TEXTS} pairs are possible",
            first,
        )
    return list(zip(firsts, seconds, strict=True)), (first, second)


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)
