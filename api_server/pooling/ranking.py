"""Scores of documents for a query: by a cross-encoder or a decoder that reranks, by the angle between vectors, or by
the vectors of tokens (late interaction)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from api_server.errors import invalid
from api_server.pooling.pooling import Ask, begin, other_task, pool
from api_server.pooling.reading import Reading, read_pairs, read_texts, route_of
from api_server.web.endpoint import Call
from interfaces import PooledValues, PoolingTask

# What is asked of a model that makes vectors, by the server's task.
_VECTOR_TASKS = {"embed": PoolingTask.EMBED, "embed_tokens": PoolingTask.EMBED_TOKENS}


@dataclass(frozen=True)
class Scores:
    """One score for each pair, the tokens of each, and those of the request."""

    values: NDArray[np.float32]
    lengths: NDArray[np.int32]
    tokens: int

    def order(self, most: int | None = None) -> list[int]:
        """The indices of the `most` highest scores, the highest first; equal ones in their own order."""
        return [int(i) for i in np.argsort(-self.values, kind="stable")[:most]]


async def scores(
    call: Call,
    pairs: Sequence[tuple[str, str]],
    reading: Reading,
    *,
    raw: bool = False,
    instruction: str | None = None,
    most_of_second: int | None = None,
    by_vectors: bool = True,
    queries: str = "query",
) -> Scores:
    """The score of each pair. If `by_vectors`, a model that makes vectors of texts gives their cosine, and one that
    makes vectors of tokens their MaxSim. Raises RequestFailed.

    `queries` is the field of the first texts, and `reading` has that of the second.
    """
    call.server.check_family(True)
    if call.server.task in _VECTOR_TASKS and by_vectors:
        if instruction is not None:
            raise invalid("instruct: a model that makes vectors takes no instruction; leave it out", "instruct")
        return await _of_vectors(call, pairs, reading, queries, most_of_second)
    if call.server.task != "rerank":
        raise other_task(call.server, "rerank")
    ask = Ask(task=PoolingTask.CLASSIFY, activate=not raw)
    with begin(call, ask):
        batch = await read_pairs(call.server, pairs, reading, instruction=instruction, most_of_second=most_of_second)
    found = await pool(call, batch, ask)
    return Scores(found.rows[:, 0], batch.lengths, found.tokens)


async def _of_vectors(
    call: Call, pairs: Sequence[tuple[str, str]], reading: Reading, field: str, most_of_second: int | None
) -> Scores:
    """Scores pairs by their vectors; each distinct first text is computed once."""
    ask = Ask(task=_VECTOR_TASKS[call.server.task])
    firsts = list(dict.fromkeys(first for first, _ in pairs))
    places = {text: i for i, text in enumerate(firsts)}
    reading_queries = _prompted(call, replace(reading, field=field), "query")
    limits = [most for most in (reading.most_tokens, most_of_second) if most is not None]
    shorter = replace(reading, most_tokens=min(limits, default=None), truncate=reading.truncate or bool(most_of_second))
    reading_documents = _prompted(call, shorter, "document")
    with begin(call, ask):
        queries = await read_texts(call.server, firsts, reading_queries)
        documents = await read_texts(call.server, [second for _, second in pairs], reading_documents)
    routes = [route_of(call.server, each) for each in (reading_queries, reading_documents)]
    if routes[0] == routes[1]:
        found = await pool(call, type(queries).joined([queries, documents]), replace(ask, route=routes[0]))
        vectors, tokens = found.values, found.tokens
    else:
        parts = [
            await pool(call, batch, replace(ask, route=route))
            for batch, route in zip((queries, documents), routes, strict=True)
        ]
        vectors = PooledValues.joined([part.values for part in parts])
        tokens = sum(part.tokens for part in parts)
    own = [places[first] for first, _ in pairs]
    if ask.task is PoolingTask.EMBED_TOKENS:
        # Millions of products, during which other requests go on.
        values = await call.server.tokenizer.in_thread(partial(_max_sims, vectors, own))
    else:
        values = np.einsum("ij,ij->i", vectors.array[: len(firsts)][own], vectors.array[len(firsts) :])
    return Scores(values, documents.lengths, tokens)


def _max_sims(vectors: PooledValues, queries: Sequence[int]) -> NDArray[np.float32]:
    """The sum over a query's tokens of the largest product with a token of its document.

    The last texts are the documents, one for each of the `queries`, which are the indices of theirs.
    """
    texts = vectors.texts()
    documents = texts[len(texts) - len(queries) :]
    return np.array(
        [
            (texts[query] @ document.T).max(axis=1).sum() if len(document) else 0.0
            for query, document in zip(queries, documents, strict=True)
        ],
        np.float32,
    )


def _prompted(call: Call, reading: Reading, name: str) -> Reading:
    """The reading with the prompt that the model has for texts of this kind, if it has one."""
    model = call.server.pooled_model
    return replace(reading, prompt_name=name) if model is not None and name in model.prompts else reading
