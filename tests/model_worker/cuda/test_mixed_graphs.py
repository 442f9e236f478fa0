"""Steps with prompts, padded to a recorded size, give what they give alone, by the kernels that serve them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.cuda.mixed_graphs import MixedBuffers, MixedGraphs, token_sizes
from model_worker.runner import ModelRunner
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.test_runner import load
from tests.model_worker.tiny_models import VOCAB, tiny_model

need_triton()

SIZE, BLOCKS_PER_ROW, MAX_ROWS, MAX_TOKENS = 16, 3, 4, 48
SPARE = MAX_ROWS * BLOCKS_PER_ROW


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = tiny_model("qwen3", tmp_path_factory.getbasetemp())
    return ModelRunner(load(path), SPARE, SIZE, "triton")


def step(queries: list[int], pasts: list[int], wanted: list[int]) -> ForwardBatch:
    rng, rows = np.random.default_rng(), len(queries)
    lens: NDArray[np.int64] = np.array(queries, np.int64) + np.array(pasts, np.int64)
    width = -(-int(lens.max()) // SIZE)
    tables = rng.permutation(SPARE)[: rows * width].reshape(rows, width)
    tokens = rng.integers(3, VOCAB, sum(queries))
    return ForwardBatch.build(tokens, np.array(queries), lens, tables, SIZE, np.array(wanted, np.int64))


def test_sizes_waste_a_third_at_most() -> None:
    assert token_sizes(300) == [16, 32, 64, 80, 96, 128, 160, 192, 256, 300]
    assert token_sizes(10) == [10]
    assert token_sizes(2048)[-1] == 2048


@pytest.mark.slow
def test_a_padded_step_equals_the_step_alone(runner: ModelRunner) -> None:
    sizes: list[int] = []

    def run_again(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return function

    def forward(batch: ForwardBatch) -> Tensor:
        sizes.append(batch.num_tokens)
        return runner.backend.logits(batch)

    cache = runner.cache
    places = BLOCKS_PER_ROW, SIZE, SPARE, torch.device("cpu")
    graphs = MixedGraphs(forward, MixedBuffers(MAX_TOKENS, MAX_ROWS, *places), run_again)
    for queries, pasts, wanted, size in (
        ([1, 18, 1], [30, 0, 0], [0, 18, 19], 32),
        ([31], [3], [30], 32),
        ([1, 5, 20, 1], [4, 40, 2, 16], [0, 5], 32),
        ([9, 7], [0, 20], [8], 16),
        ([40, 1, 1], [1, 1, 1], [39, 40, 41], 48),
    ):
        batch = step(queries, pasts, wanted)
        for tensor in (*cache.k, *cache.v):
            tensor.normal_()
        before = [tensor.clone() for tensor in (*cache.k, *cache.v)]
        want = runner.backend.logits(batch)
        written = [tensor.clone() for tensor in (*cache.k, *cache.v)]
        for tensor, values in zip((*cache.k, *cache.v), before, strict=True):
            tensor.copy_(values)
        assert graphs.fits(batch)
        torch.testing.assert_close(graphs.run(batch), want, atol=1e-4, rtol=1e-4)
        assert sizes[-1] == size
        for tensor, values in zip((*cache.k, *cache.v), written, strict=True):
            close = torch.allclose(tensor[:SPARE], values[:SPARE], atol=1e-5, rtol=1e-4)
            assert close, "padding wrote a block of a sequence"


def test_only_what_was_recorded_fits(runner: ModelRunner) -> None:
    places = BLOCKS_PER_ROW, SIZE, SPARE, torch.device("cpu")
    graphs = MixedGraphs(runner.backend.logits, MixedBuffers(MAX_TOKENS, MAX_ROWS, *places), lambda function: function)
    fitting = step([2, 3], [0, 0], [1, 4])
    assert graphs.fits(fitting)
    assert not graphs.fits(step([2, 3], [0, 0], [])), "no logits wanted"
    assert not graphs.fits(step([49], [0], [48])), "more tokens"
    assert not graphs.fits(step([8], [0], [0, 1, 2, 3, 4])), "more logits"
    assert not graphs.fits(step([2], [60], [0])), "a longer sequence"
    assert not graphs.fits(replace(fitting, adapters=np.zeros(2, np.int32))), "adapters"
    assert not graphs.fits(replace(fitting, seen=torch.zeros(2, 5, dtype=torch.int32))), "later keys seen"
    assert not graphs.fits(replace(fitting, positions=torch.zeros(3, 5, dtype=torch.int64))), "positions of images"
