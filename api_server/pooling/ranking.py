"""Scores of documents for a query: by a cross-encoder or a decoder that reranks, or by the angle between vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from api_server.errors import invalid
from api_server.pooling.pooling import Ask, begin, other_task, pool
from api_server.pooling.reading import Reading, read_pairs, read_texts
from api_server.web.endpoint import Call
from interfaces import PoolingTask


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
    """The score of each pair. A model that makes vectors gives their cosine, if `by_vectors`. Raises RequestFailed.

    `queries` is the field of the first texts, and `reading` has that of the second.
    """
    call.server.check_family(True)
    if call.server.task == "embed" and by_vectors:
        if instruction is not None:
            raise invalid("instruct: a model that makes vectors takes no instruction; leave it out", "instruct")
        return await _cosines(call, pairs, reading, queries, most_of_second)
    if call.server.task != "rerank":
        raise other_task(call.server, "rerank")
    ask = Ask(task=PoolingTask.CLASSIFY, activate=not raw)
    begin(call, ask)
    batch = await read_pairs(call.server, pairs, reading, instruction=instruction, most_of_second=most_of_second)
    found = await pool(call, batch, ask)
    return Scores(found.rows[:, 0], batch.lengths, found.tokens)


async def _cosines(
    call: Call, pairs: Sequence[tuple[str, str]], reading: Reading, field: str, most_of_second: int | None
) -> Scores:
    """Scores pairs by their vectors; each distinct first text is computed once."""
    ask = Ask(task=PoolingTask.EMBED)
    begin(call, ask)
    firsts = list(dict.fromkeys(first for first, _ in pairs))
    places = {text: i for i, text in enumerate(firsts)}
    queries = await read_texts(call.server, firsts, _prompted(call, replace(reading, field=field), "query"))
    limits = [most for most in (reading.most_tokens, most_of_second) if most is not None]
    shorter = replace(reading, most_tokens=min(limits, default=None), truncate=reading.truncate or bool(most_of_second))
    documents = await read_texts(call.server, [second for _, second in pairs], _prompted(call, shorter, "document"))
    batch = type(queries).joined([queries, documents])
    found = await pool(call, batch, ask)
    beginnings = found.rows[: len(firsts)][[places[first] for first, _ in pairs]]
    cosines = np.einsum("ij,ij->i", beginnings, found.rows[len(firsts) :])
    return Scores(cosines, documents.lengths, found.tokens)


def _prompted(call: Call, reading: Reading, name: str) -> Reading:
    """The reading with the prompt that the model has for texts of this kind, if it has one."""
    model = call.server.pooled_model
    return replace(reading, prompt_name=name) if model is not None and name in model.prompts else reading
