"""POST /v1/score in SGLang's form: the probability of each of some tokens after a query and an item, for every item."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api_server.answers.choice import Choice, complete
from api_server.body.item_limits import check_prompts, check_total
from api_server.body.validation import Mismatch, parse
from api_server.dialects.sglang.errors import ERROR_STATUSES
from api_server.dialects.sglang.schema import ErrorResponse, Integers, Texts
from api_server.errors import invalid
from api_server.generation.generation import generate
from api_server.web.endpoint import Call, Document
from interfaces import MOST_LOGPROB_IDS, LogprobMode, RequestID, SamplingParamsInput, TextGenerationRequest


class ScoreRequest(BaseModel):
    """Query and items are both texts or both token ids; a text item continues the query without special tokens."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    query: str | Integers
    items: str | Texts | Annotated[list[Integers], Field(fail_fast=True)]
    label_token_ids: Integers = Field(min_length=1, max_length=MOST_LOGPROB_IDS)
    apply_softmax: bool = Field(False, description="Over the labels alone, so that each item's scores add up to 1")
    item_first: bool = Field(False, description="The item comes before the query")
    model: str | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ScoreResponse(BaseModel):
    """One row of scores for each item, in the order of `label_token_ids`."""

    scores: list[list[float]]
    model: str
    usage: Usage
    object: str


SCORE = Document(
    summary="Probability of tokens after each of several texts",
    tag="sglang",
    body=ScoreRequest,
    answer=ScoreResponse,
    example={"query": "Is it true? ", "items": ["2 + 3 = 5", "2 + 3 = 6"], "label_token_ids": [5, 6]},
    errors=dict.fromkeys((*ERROR_STATUSES, 404), ErrorResponse),
    generates=True,
)


async def score(call: Call) -> Response:
    """POST /v1/score with `label_token_ids`."""
    call.server.check_family(False)
    body = await call.apart(lambda: _read(call))
    call.server.check_model(body.model or "")
    prompts = await _prompts(body, call)
    generation = await generate(call.server, [_request(call, prompt, body.label_token_ids) for prompt in prompts])
    choices = await generation.collect()
    prompt_tokens = sum(choice.prompt_tokens for choice in choices)
    answer = {
        "scores": [_scores(choice, body) for choice in choices],
        "model": call.server.model_name,
        "usage": Usage(prompt_tokens=prompt_tokens, completion_tokens=0, total_tokens=prompt_tokens).model_dump(),
        "object": "scoring",
    }
    return Response(orjson.dumps(answer), media_type="application/json")


def _read(call: Call) -> ScoreRequest:
    check_prompts(call.json.get("items"), "items", call.server)
    check_prompts(call.json.get("query"), "query", call.server)
    try:
        body = parse(ScoreRequest, call.json)
    except Mismatch as mismatch:
        raise invalid(str(mismatch), mismatch.field) from None
    vocab_size = call.server.engine.model.vocab_size or call.server.tokenizer.vocab_size
    for token in body.label_token_ids:
        if not 0 <= token < vocab_size:
            raise invalid(f"Token ID {token} is out of vocabulary: ids are 0 to {vocab_size - 1}", "label_token_ids")
    if body.items == []:
        raise invalid("items must not be empty", "items")
    return body


async def _prompts(body: ScoreRequest, call: Call) -> list[list[int]]:
    items: list[Any] = [body.items] if isinstance(body.items, str) else list(body.items)
    if any(isinstance(item, str) != isinstance(body.query, str) for item in items):
        raise invalid("query and items must both be texts or both be token ids", "items")
    if not isinstance(body.query, str):
        return _joined(body, list(body.query), items)
    query = await _encode(call, body.query, None if not body.item_first else False)
    ends = [await _encode(call, item, None if body.item_first else False) for item in items]
    return _joined(body, query, ends)


def _joined(body: ScoreRequest, query: list[int], items: list[list[int]]) -> list[list[int]]:
    check_total(len(query) * len(items) + sum(map(len, items)), "items")
    return [item + query if body.item_first else query + item for item in items]


async def _encode(call: Call, text: str, add_special_tokens: bool | None) -> list[int]:
    if not text:
        return []
    request = TextGenerationRequest(RequestID(call.request_id), prompt=text, add_special_tokens=add_special_tokens)
    ids: list[int] = (await call.server.tokenizer.prompt(request, call.server.max_model_len)).tokens.tolist()
    return ids


def _request(call: Call, prompt: Sequence[int], labels: Sequence[int]) -> TextGenerationRequest:
    """A request for one greedy token, whose log-probabilities are the model's own."""
    return TextGenerationRequest(
        request_id=RequestID(call.request_id),
        prompt=prompt,
        sampling=SamplingParamsInput(
            temperature=0.0, max_new_tokens=1, logprobs=LogprobMode.TEMPERED, logprob_ids=list(dict.fromkeys(labels))
        ),
        model_defaults=False,
        token_details=True,
        request_path=call.path,
        received=call.received,
    )


def _scores(choice: Choice, body: ScoreRequest) -> list[float]:
    complete(choice.finish)
    found: Mapping[int, float] = choice.tokens[0].asked
    logprobs = [found[token] for token in body.label_token_ids]
    if not body.apply_softmax:
        return [math.exp(value) for value in logprobs]
    most = max(logprobs)
    weights = [math.exp(value - most) for value in logprobs]
    return [weight / sum(weights) for weight in weights]
