"""POST /rerank with `documents`: Cohere's and Jina's bodies, and what vLLM's clients add."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api_server.body import item_limits, unknown_fields
from api_server.body.unknown_fields import Refusals, unless
from api_server.body.validation import Mismatch, parse
from api_server.dialects.openai import errors as openai_errors
from api_server.errors import RequestFailed, invalid
from api_server.pooling.pooling import name_of_model
from api_server.pooling.ranking import Scores, scores
from api_server.pooling.reading import MOST_TEXTS, Reading
from api_server.web.endpoint import Call, Document

# Cohere's default of max_tokens_per_doc.
_TOKENS_OF_A_DOCUMENT = 4096
# The path whose answers have no documents unless they are asked for: Cohere's second version.
_WITHOUT_DOCUMENTS = "/v2/rerank"

_REFUSED: Refusals = {
    "rank_fields": ("ranking by other fields than text", unless(None, ["text"])),
    "mm_processor_kwargs": ("images", unless(None, {})),
}
# Known fields that change no answer here.
_WITHOUT_EFFECT = frozenset({"user", "request_id", "client_name", "embedding_type"})


class RerankBody(BaseModel):
    """A query and documents; documents that are too long are cut, as Cohere and Jina do."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = Field(None, description="The served model's name, or nothing")
    query: str = Field(min_length=1)
    documents: Annotated[list[str | dict[str, Any]], Field(fail_fast=True, min_length=1)] = Field(
        description=f"Texts, or objects with a text; at most {MOST_TEXTS}"
    )
    top_n: int | None = Field(None, ge=0, description="Answer with so many of the best; default all")
    return_documents: bool | None = Field(
        None, description=f"Answer with the documents; default true, and false at {_WITHOUT_DOCUMENTS}"
    )
    max_tokens_per_doc: int = Field(_TOKENS_OF_A_DOCUMENT, ge=1, description="Cut documents to so many tokens")
    max_chunks_per_doc: int | None = Field(None, description="Accepted, without effect")
    truncation: bool = Field(True, description="false: a document that is too long for the model is an error")
    truncate_prompt_tokens: int | None = Field(None, ge=-1, description="Cut query and document to so many tokens")
    use_activation: bool | None = Field(None, description="false gives logits instead of probabilities")
    activation: bool | None = Field(None, description="As use_activation")


class RankedDocument(BaseModel):
    model_config = ConfigDict(extra="allow")

    text: str


class Result(BaseModel):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class RerankAnswer(BaseModel):
    """The documents, the best first."""

    id: str
    model: str
    results: list[Result]
    usage: RerankUsage
    meta: dict[str, Any]


class ErrorResponse(BaseModel):
    """Cohere's clients read `message`, those of OpenAI and vLLM `error`."""

    message: str
    error: dict[str, Any]


RERANK = Document(
    "Scores of documents for a query, the best first",
    "cohere",
    body=RerankBody,
    answer=RerankAnswer,
    example={"model": "", "query": "What is a train?", "documents": ["Cars in a row.", "A fruit."], "top_n": 2},
    errors=dict.fromkeys((400, 404, 413, 415, 429, 500, 503), ErrorResponse),
    description="A model that makes vectors of texts ranks by their cosine.",
    pools=True,
)


async def rerank(call: Call) -> Response:
    """POST /rerank, /v1/rerank and /v2/rerank with `documents`."""
    body = await call.apart(lambda: _read(call))
    pairs = [(body.query, _text(document)) for document in body.documents]
    found = await scores(
        call,
        pairs,
        _reading(body),
        raw=body.use_activation is False or body.activation is False,
        most_of_second=body.max_tokens_per_doc if body.truncation else None,
    )
    return Response(orjson.dumps(_answer(call, body, found)), media_type="application/json")


def render_error(error: RequestFailed, call: Call) -> Response:
    response = openai_errors.render_error(error, call)
    body = openai_errors.error_body(error)
    headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else {}
    content = orjson.dumps({"message": error.message, **body})
    return Response(content, response.status_code, headers, "application/json")


def _read(call: Call) -> RerankBody:
    unknown_fields.check(call.json, RerankBody, _REFUSED, _WITHOUT_EFFECT)
    check_documents(call.json.get("documents"))
    try:
        body = parse(RerankBody, call.json)
    except Mismatch as mismatch:
        raise invalid(str(mismatch), mismatch.field or None) from None
    call.server.check_model(body.model or "")
    return body


def check_documents(given: Any) -> None:
    """Raises RequestFailed for too many documents, and for one without a text."""
    if not isinstance(given, list):
        return
    item_limits.check_count(len(given), "texts", "documents", MOST_TEXTS)
    for i, document in enumerate(given):
        text = document.get("text") if isinstance(document, dict) else document
        if isinstance(document, dict) and not isinstance(text, str):
            raise invalid(f"documents[{i}] must be a text, or an object with a `text`", "documents")
        if text == "":
            raise invalid(f"documents[{i}] must not be empty: leave empty texts out", "documents")


def _reading(body: RerankBody) -> Reading:
    most = body.truncate_prompt_tokens
    if most == 0:
        where = "truncate_prompt_tokens"
        raise invalid(f"{where} must be at least 1, or -1 for the model's own limit, got 0", where)
    return Reading(
        field="documents",
        truncate=body.truncation or most is not None,
        most_tokens=most if most is not None and most > 0 else None,
        remedy="truncation: true, which cuts it",
    )


def _text(document: str | dict[str, Any]) -> str:
    return document if isinstance(document, str) else str(document["text"])


def _answer(call: Call, body: RerankBody, found: Scores) -> dict[str, Any]:
    shown = body.return_documents
    if shown is None:
        shown = call.path != _WITHOUT_DOCUMENTS
    values = found.values.tolist()
    results = []
    for i in found.order(body.top_n):
        result: dict[str, Any] = {"index": i, "relevance_score": values[i]}
        if shown:
            document = body.documents[i]
            result["document"] = {"text": document} if isinstance(document, str) else document
        results.append(result)
    return {
        "id": call.request_id,
        "model": name_of_model(call),
        "results": results,
        "usage": {"prompt_tokens": found.tokens, "total_tokens": found.tokens},
        "meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": found.tokens}},
    }
