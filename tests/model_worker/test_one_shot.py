"""Batches of texts on a worker: parts with equal options run together, and one that fails takes no other with it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from interfaces import Batch, BatchResult, PoolingContext, PoolingTask, decode, encode
from model_worker import one_shot
from model_worker.one_shot import TextRunner


class Summing:
    """A pooling model whose vector of a text is the sum and the number of its tokens. Token 666 is refused."""

    tasks = frozenset({PoolingTask.EMBED, PoolingTask.EMBED_TOKENS})
    vocab_size = 1000
    max_model_len = 512
    hidden_size = 2
    labels: list[str]
    architecture = "Summing"
    dtype = "float32"
    backend = "numpy"

    def __init__(self) -> None:
        self.labels = []
        self.ran: list[PoolingContext] = []

    def run(self, texts: PoolingContext) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        if 666 in texts.tokens:
            raise ValueError("666 is refused")
        self.ran.append(texts)
        if texts.task == PoolingTask.EMBED_TOKENS:
            return np.stack([texts.tokens, np.ones(len(texts.tokens))], 1).astype(np.float32), texts.lengths
        rows = [[text.sum(), len(text)] for text in texts.texts()]
        return np.array(rows, np.float32), np.ones(len(texts), np.int32)


def run(model: Summing, *parts: PoolingContext) -> BatchResult:
    batch = decode(encode(Batch(3, 4, 5, list(parts))))
    result = decode(encode(TextRunner(model, 2, 4).begin(batch).result()))
    assert isinstance(result, BatchResult)
    return result


def embed(*texts: list[int], task: PoolingTask = PoolingTask.EMBED, **options: object) -> PoolingContext:
    return PoolingContext.of(texts, task, **options)


def values_of(result: BatchResult) -> list[list[list[list[float]]] | None]:
    return [None if part is None else [text.tolist() for text in part.texts()] for part in result.parts]


def test_parts_with_equal_options_run_together_and_come_back_in_order() -> None:
    model = Summing()
    result = run(
        model, embed([1, 2], [3]), embed([4], task=PoolingTask.EMBED_TOKENS), embed([5]), embed([6], dimensions=1)
    )
    assert (result.incarnation, result.epoch, result.index, result.number) == (3, 4, 2, 5)
    assert values_of(result) == [[[[3, 2]], [[3, 1]]], [[[4, 1]]], [[[5, 1]]], [[[6, 1]]]]
    assert [len(context) for context in model.ran] == [3, 1, 1]
    assert result.errors == {}
    assert result.device_us > 0


def test_a_part_of_several_rows_a_text() -> None:
    model = Summing()
    tokens = PoolingTask.EMBED_TOKENS
    result = run(model, embed([1, 2], [3], task=tokens), embed([4, 5, 6], task=tokens))
    assert values_of(result) == [[[[1, 1], [2, 1]], [[3, 1]]], [[[4, 1], [5, 1], [6, 1]]]]
    assert len(model.ran) == 1


def test_a_part_that_fails_leaves_the_others_alone() -> None:
    result = run(Summing(), embed([1]), embed([2], [666]), embed([3]))
    assert values_of(result) == [[[[1, 1]]], None, [[[3, 1]]]]
    assert result.errors == {1: "666 is refused"}


def test_values_that_no_message_can_hold_fail_their_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "MOST_INLINE_BYTES", 16)
    tokens = PoolingTask.EMBED_TOKENS
    result = run(Summing(), embed([1, 2, 3], task=tokens), embed([4, 5], task=tokens))
    assert values_of(result) == [None, [[[4, 1], [5, 1]]]]
    assert "the values take 24 bytes, and 16 can be sent without shared memory" in result.errors[0]
