"""TEI's routes, without the paths that it shares with other dialects (`dialects/pooling_routes.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from starlette.responses import Response
from starlette.routing import Route

from api_server.body import item_limits, unknown_fields
from api_server.body.validation import Mismatch, parse
from api_server.dialects.tei import schema
from api_server.dialects.tei.errors import ERROR_STATUSES, EmptyInput, render_error
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.pooling import rendering
from api_server.pooling.pooling import Ask, Pooled, begin, pool, pool_texts
from api_server.pooling.ranking import scores
from api_server.pooling.reading import MOST_TEXTS, Item, Reading, read_pairs, read_texts
from api_server.release import release
from api_server.text.pooled_model import PooledModel
from api_server.text.text_batches import TextBatch
from api_server.text.tokenizer import THREADS
from api_server.web.endpoint import Call, Document, endpoint
from interfaces import PoolingTask

TAG = "tei"

# Parts of /info's `model_type` by the task of the server.
_KINDS = {"rerank": "reranker", "classify": "classifier", "classify_tokens": "classifier"}

_TRUNCATION = "`truncate: true`, which cuts it"
_ERRORS = dict.fromkeys(ERROR_STATUSES, schema.ErrorResponse)
_EXAMPLE = {"inputs": ["a switchyard", "a train"]}

B = TypeVar("B", bound=schema.Body)

EMBED = Document(
    "Vectors of texts",
    TAG,
    body=schema.EmbedBody,
    answer=schema.EmbedAnswer,
    example=_EXAMPLE,
    errors=_ERRORS,
    pools=True,
)
RERANK = Document(
    "Scores of texts for a query, the best first",
    TAG,
    body=schema.RerankBody,
    answer=schema.Rank,
    listed=True,
    example={"query": "What is a train?", "texts": ["Cars in a row.", "A fruit."]},
    errors=_ERRORS,
    pools=True,
)
_EMBED_ALL = Document(
    "A vector of each token of texts",
    TAG,
    body=schema.InputsBody,
    answer=schema.EmbedAllAnswer,
    example=_EXAMPLE,
    errors=_ERRORS,
    pools=True,
)
_EMBED_SPARSE = Document(
    "Sparse vectors of texts",
    TAG,
    body=schema.InputsBody,
    answer=schema.EmbedSparseAnswer,
    example=_EXAMPLE,
    errors=_ERRORS,
    pools=True,
)
_PREDICT = Document(
    "Labels of texts",
    TAG,
    body=schema.PredictBody,
    answer=schema.PredictAnswer,
    example={"inputs": [["I like it"], ["I do not"]]},
    errors=_ERRORS,
    pools=True,
)
_SIMILARITY = Document(
    "Cosines of a sentence with others",
    TAG,
    body=schema.SimilarityBody,
    answer=schema.SimilarityAnswer,
    example={"inputs": {"source_sentence": "a switchyard", "sentences": ["a train", "an apple"]}},
    errors=_ERRORS,
    pools=True,
)

INFO = Document("Model and limits", TAG, answer=schema.Info, errors={503: schema.ErrorResponse})


def routes() -> list[Route]:
    return [
        endpoint("/embed", embed, render_error, document=EMBED),
        endpoint("/embed_all", embed_all, render_error, document=_EMBED_ALL),
        endpoint("/embed_sparse", embed_sparse, render_error, document=_EMBED_SPARSE),
        endpoint("/predict", predict, render_error, document=_PREDICT),
        endpoint("/similarity", similarity, render_error, document=_SIMILARITY),
    ]


async def info(call: Call) -> Response:
    """GET /info of a model that pools."""
    server = call.server
    model = server.pooled_model
    status = server.engine.status
    if model is None or status is None or server.max_model_len is None:
        raise RequestFailed(ErrorKind.UNAVAILABLE, "the model is not loaded yet", retry_after=1)
    settings = server.settings
    facts = schema.Info(
        model_id=settings.model,
        model_sha=None,
        model_dtype=settings.dtype,
        model_type={_KINDS.get(model.task, "embedding"): _facts_of(model)},
        max_concurrent_requests=server.most_requests,
        max_input_length=server.longest_text or server.max_model_len,
        max_batch_tokens=max((worker.text_tokens for worker in status.workers), default=0) or settings.max_batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=MOST_TEXTS,
        auto_truncate=False,
        tokenization_workers=THREADS,
        version=release(),
        sha=None,
        docker_label=None,
    )
    return Response(facts.model_dump_json(), media_type="application/json")


def _facts_of(model: PooledModel) -> dict[str, Any]:
    if model.task not in _KINDS:
        return {"pooling": model.pooling}
    names = model.files.labels
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


async def at_root(call: Call) -> Response:
    """POST / and /invocations: the body's form and the model's task choose the route, as in TEI."""
    if "texts" in call.json:
        return await rerank(call)
    if isinstance(call.json.get("inputs"), dict):
        return await similarity(call)
    by_task = {
        "embed_tokens": embed_all,
        "sparse": embed_sparse,
        "classify": predict,
        "classify_tokens": predict,
        "rerank": predict,
    }
    return await by_task.get(call.server.task, embed)(call)


async def embed(call: Call) -> Response:
    """POST /embed."""
    body = await call.apart(lambda: _read(call, schema.EmbedBody))
    ask = Ask(task=PoolingTask.EMBED, dimensions=body.dimensions, normalize=body.normalize is not False)
    pooled = await _pooled(call, body, ask)
    return await rendering.answer(call, pooled.rows, pooled.rows.size)


async def embed_all(call: Call) -> Response:
    """POST /embed_all."""
    body = await call.apart(lambda: _read(call, schema.InputsBody))
    pooled = await _pooled(call, body, Ask(task=PoolingTask.EMBED_TOKENS, normalize=False))
    return await rendering.answer(call, pooled.values.texts(), pooled.values.array.size)


async def embed_sparse(call: Call) -> Response:
    """POST /embed_sparse."""
    body = await call.apart(lambda: _read(call, schema.InputsBody))
    pooled = await _pooled(call, body, Ask(task=PoolingTask.SPARSE))
    items = ([{"index": int(i), "value": value} for i, value in rows] for rows in pooled.values.texts())
    return await rendering.answer(call, items, 4 * pooled.values.array.size)


async def rerank(call: Call) -> Response:
    """POST /rerank with `texts`."""
    body = await call.apart(lambda: _read(call, schema.RerankBody, "texts"))
    pairs = [(body.query, text) for text in body.texts]
    found = await scores(call, pairs, _reading(body, "texts"), raw=bool(body.raw_scores), by_vectors=False)
    values = found.values.tolist()
    items = (
        {"index": i, "score": values[i]} | ({"text": body.texts[i]} if body.return_text else {}) for i in found.order()
    )
    return await rendering.answer(call, items, len(pairs))


async def predict(call: Call) -> Response:
    """POST /predict."""
    body = await call.apart(lambda: _read(call, schema.PredictBody))
    listed = isinstance(body.inputs, list) and isinstance(body.inputs[0], list)
    inputs: list[Any] = list(body.inputs) if listed else [body.inputs]
    ask = Ask(task=PoolingTask.CLASSIFY, activate=not body.raw_scores)
    with begin(call, ask):
        batch = await _sequences(call, [_sequence(each) for each in inputs], body)
    pooled = await pool(call, batch, ask)
    predictions = _predictions(pooled, call.server.engine.model.labels)
    return await rendering.answer(call, predictions if listed else next(predictions), pooled.rows.size)


async def similarity(call: Call) -> Response:
    """POST /similarity."""
    body = await call.apart(lambda: _parsed(call, schema.SimilarityBody))
    sentences = body.inputs.sentences
    if not sentences:
        raise EmptyInput("inputs.sentences")
    if "" in sentences:
        raise EmptyInput(f"inputs.sentences[{sentences.index('')}]")
    _check_size(len(sentences) + 1)
    parameters = body.parameters or schema.SimilarityParameters()
    reading = _reading(parameters, "inputs.sentences", parameters.prompt_name)
    # The source comes last, so that errors name a sentence by its index.
    pooled = await pool_texts(call, [*sentences, body.inputs.source_sentence], reading, Ask(task=PoolingTask.EMBED))
    return await rendering.answer(call, pooled.rows[:-1] @ pooled.rows[-1], len(sentences))


def _parsed(call: Call, model: type[B]) -> B:
    unknown_fields.check(call.json, model, {})
    try:
        return parse(model, call.json)
    except Mismatch as mismatch:
        raise invalid(str(mismatch), mismatch.field or None) from None


def _read(call: Call, model: type[B], field: str = "inputs") -> B:
    """Reads a body whose texts are in `field`. Raises RequestFailed."""
    given = call.json.get(field)
    if isinstance(given, list | str) and not given:
        raise EmptyInput(field)
    if isinstance(given, list) and not isinstance(given[0], int):
        _check_size(len(given))
        for i, text in enumerate(given):
            if isinstance(text, list | str) and not text:
                raise EmptyInput(f"{field}[{i}]")
    return _parsed(call, model)


def _check_size(count: int) -> None:
    if count > MOST_TEXTS:
        raise invalid(f"batch size {count} > maximum allowed batch size {MOST_TEXTS}", "inputs")


def _reading(body: schema.Truncation, field: str, prompt_name: str | None = None, listed: bool = True) -> Reading:
    return Reading(
        field=field,
        truncate=bool(body.truncate),
        keep_end=body.keeps_end,
        prompt_name=prompt_name,
        remedy=_TRUNCATION,
        listed=listed,
    )


async def _pooled(call: Call, body: schema.InputsBody, ask: Ask) -> Pooled:
    inputs = body.inputs
    listed = isinstance(inputs, list) and not isinstance(inputs[0], int)
    items: Any = inputs if listed else [inputs]
    return await pool_texts(call, items, _reading(body, "inputs", body.prompt_name, listed), ask)


def _sequence(given: str | list[str]) -> str | tuple[str, str]:
    """One text, or a pair of texts."""
    if isinstance(given, str):
        return given
    if len(given) not in (1, 2):
        raise invalid(f"inputs: a list stands for one text or for a pair of texts, got {len(given)} texts", "inputs")
    if "" in given:
        raise EmptyInput("inputs")
    return given[0] if len(given) == 1 else (given[0], given[1])


async def _sequences(call: Call, sequences: Sequence[str | tuple[str, str]], body: schema.PredictBody) -> TextBatch:
    """The tokens of texts and of pairs, in their order."""
    item_limits.check_count(len(sequences), "texts", "inputs", MOST_TEXTS)
    reading = _reading(body, "inputs", listed=isinstance(body.inputs, list) and isinstance(body.inputs[0], list))
    groups = [(is_pair, list(group)) for is_pair, group in groupby(sequences, key=lambda each: isinstance(each, tuple))]
    first = 0
    parts = []
    for is_pair, group in groups:
        chosen: list[Any] = group
        texts: list[Item] = chosen
        here = replace(reading, first=first, whole=len(groups) == 1)
        first += len(chosen)
        read = read_pairs(call.server, chosen, here) if is_pair else read_texts(call.server, texts, here)
        parts.append(await read)
        item_limits.check_total(sum(len(part.tokens) for part in parts), "inputs")
    return TextBatch.joined(parts)


def _predictions(pooled: Pooled, labels: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    for row in pooled.rows:
        order = np.argsort(-row, kind="stable").tolist()
        yield [{"label": labels[i] if i < len(labels) else f"LABEL_{i}", "score": row[i]} for i in order]
