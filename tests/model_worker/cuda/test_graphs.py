"""Decode steps in buckets give what the same steps give alone, and padding touches no block of a sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.cuda.graphs import DecodeBuffers, DecodeGraphs, bucket_sizes
from model_worker.runner import ModelRunner
from tests.model_worker.test_runner import load
from tests.model_worker.tiny_models import VOCAB, tiny_model

BLOCK_SIZE, BLOCKS_PER_ROW, MAX_ROWS = 4, 5, 6
SPARE = MAX_ROWS * BLOCKS_PER_ROW


def run_again(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A recorder that calls the function anew each time: it reads and writes what a replay would."""
    function()
    return function


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = tiny_model("qwen3", tmp_path_factory.getbasetemp())
    return ModelRunner(load(path), SPARE + 1, BLOCK_SIZE, "reference")


def decode_step(rng: np.random.Generator, rows: int) -> ForwardBatch:
    kv_lens = rng.integers(1, BLOCKS_PER_ROW * BLOCK_SIZE + 1, rows)
    needed = -(-int(kv_lens.max()) // BLOCK_SIZE)
    tables = rng.permutation(SPARE)[: rows * needed].reshape(rows, needed)
    tokens = rng.integers(3, VOCAB, rows)
    return ForwardBatch.build(tokens, np.ones(rows, np.int64), kv_lens, tables, BLOCK_SIZE, np.arange(rows))


@given(most=st.integers(1, 5000))
def test_every_batch_has_a_bucket_less_than_twice_its_size(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)), "each size once, in order"
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(sizes))


def test_a_decode_step_in_a_bucket_equals_the_step_alone(runner: ModelRunner) -> None:
    rng, cache = np.random.default_rng(), runner.cache
    buffers = DecodeBuffers(MAX_ROWS, BLOCKS_PER_ROW, BLOCK_SIZE, SPARE, torch.device("cpu"))
    calls: list[int] = []

    def forward(batch: ForwardBatch) -> Tensor:
        calls.append(batch.num_tokens)
        return runner.backend.logits(batch)

    graphs = DecodeGraphs(forward, buffers, run_again)
    assert calls == [6, 4, 2, 1]
    for rows in [*range(1, MAX_ROWS + 1), *rng.integers(1, MAX_ROWS + 1, 10).tolist()]:
        batch = decode_step(rng, rows)
        for tensor in (*cache.k, *cache.v):
            tensor.normal_()
        before = [tensor.clone() for tensor in (*cache.k, *cache.v)]
        want = runner.backend.logits(batch)
        written = [tensor.clone() for tensor in (*cache.k, *cache.v)]
        for tensor, values in zip((*cache.k, *cache.v), before, strict=True):
            tensor.copy_(values)
        assert graphs.fits(batch)
        got = graphs.run(batch)
        assert calls[-1] == next(size for size in graphs.sizes if size >= rows)
        torch.testing.assert_close(got, want)
        for tensor, values in zip((*cache.k, *cache.v), written, strict=True):
            torch.testing.assert_close(tensor[:SPARE], values[:SPARE], msg="padding wrote a block of a sequence")


def test_only_plain_decode_steps_fit(runner: ModelRunner) -> None:
    rng = np.random.default_rng()
    buffers = DecodeBuffers(MAX_ROWS, BLOCKS_PER_ROW, BLOCK_SIZE, SPARE, torch.device("cpu"))
    graphs = DecodeGraphs(runner.backend.logits, buffers, run_again)

    def step(query_lens: list[int], wanted: list[int], kv_len: int = 7, **more: object) -> ForwardBatch:
        rows, lens = len(query_lens), np.array(query_lens)
        tables = np.zeros((rows, -(-kv_len // BLOCK_SIZE)), np.int32)
        kv_lens = np.full(rows, kv_len)
        build = ForwardBatch.build
        return build(np.ones(lens.sum(), int), lens, kv_lens, tables, BLOCK_SIZE, np.array(wanted), **more)  # type: ignore[arg-type]

    assert graphs.fits(decode_step(rng, MAX_ROWS))
    assert graphs.fits(step([1, 1], [0, 1]))
    assert not graphs.fits(step([1, 2], [0, 2])), "a prompt"
    assert not graphs.fits(step([1, 1], [1])), "a row that does not sample"
    assert not graphs.fits(step([1, 1], [1, 1])), "logits twice"
    assert not graphs.fits(step([1] * (MAX_ROWS + 1), list(range(MAX_ROWS + 1)))), "more rows than the largest bucket"
    longest = BLOCKS_PER_ROW * BLOCK_SIZE
    assert not graphs.fits(step([1], [0], longest + 1)), "more blocks than recorded"
    vectors = (np.zeros(1, np.int64), np.zeros((1, runner.loaded.hidden_size), np.float32))
    assert not graphs.fits(step([1], [0], embeddings=vectors)), "vectors for tokens"


def test_what_is_derived_from_buffers_is_derived_again() -> None:
    """A derived column that outlived its step would send the next step's keys to the old slots."""
    buffers = DecodeBuffers(2, BLOCKS_PER_ROW, BLOCK_SIZE, SPARE, torch.device("cpu"))
    rng = np.random.default_rng()
    for rows in (2, 1, 2):
        batch = decode_step(rng, rows)
        buffers.fill(batch, 2)
        static = buffers.batch(2)
        torch.testing.assert_close(static.slot_block[:rows], batch.slot_block)
        torch.testing.assert_close(static.kv_start[: rows + 1], batch.kv_start)
        assert static.slot_block[rows:].tolist() == [SPARE] * (2 - rows)
