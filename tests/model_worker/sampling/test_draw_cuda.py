"""Tokens that are drawn without the host are the tokens that the sampler draws with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces import SamplingParams
from model_worker.sampling import draw, draw_cuda
from model_worker.sampling.sampler import SamplerRows

EMPTY = np.empty(0, np.int32)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 1, 3, 30, 3000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(params, min_size=1, max_size=8),
    width=st.sampled_from([5, 200, 2500]),
    levels=st.none() | st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 30),
)
def test_tokens_equal_the_samplers(
    rows: list[SamplingParams], width: int, levels: int | None, dtype: torch.dtype, seed: int
) -> None:
    """`levels` is how many different logits there are, so that many are equal at the edges."""
    rng = np.random.default_rng(seed)
    sampler = SamplerRows(16, width, torch.device("cpu"))
    held = rng.permutation(16)[: len(rows)].astype(np.int32)
    for row, values in zip(held.tolist(), rows, strict=True):
        sampler.join(row, values, [], EMPTY, EMPTY)
    logits = rng.normal(0, 3, (len(rows), width)) if levels is None else rng.integers(0, levels, (len(rows), width))
    table = torch.from_numpy(logits.astype(np.float32)).to(dtype)
    for row in np.flatnonzero(rng.random(len(rows)) < 0.1):
        table[row, rng.integers(width)] = rng.choice([np.nan, np.inf])
    for row in np.flatnonzero(rng.random(len(rows)) < 0.2):
        table[row, rng.random(width) < 0.5] = -torch.inf
    positions = rng.integers(0, 1 << 20, len(rows))
    assert not sampler.needs_host(held)
    want = sampler.sample(table.clone(), held, positions)
    got = sampler.sample_ahead(table, held, positions).tokens.numpy()
    bad = np.zeros(len(rows), np.bool_) if want.bad is None else want.bad
    np.testing.assert_array_equal(got, np.where(bad, -1, want.tokens))


def test_a_free_row_is_greedy_beside_drawn_ones() -> None:
    """Its join was refused, and steps in flight name it."""
    width = 2 * draw.NARROW
    sampler = SamplerRows(2, width, torch.device("cpu"))
    sampler.join(0, SamplingParams(top_k=5, seed=1), [], EMPTY, EMPTY)
    logits = torch.from_numpy(np.random.default_rng().normal(0, 3, (2, width)).astype(np.float32))
    rows, positions = np.array([1, 0], np.int32), np.zeros(2, np.int64)
    got = sampler.sample_ahead(logits.clone(), rows, positions).tokens
    assert int(got[0]) == int(logits[0].argmax())
    assert got.tolist() == sampler.sample(logits, rows, positions).tokens.tolist()


def test_pieces_of_a_batch_draw_as_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng()
    logits = torch.from_numpy(rng.normal(0, 3, (7, 90)).astype(np.float32))
    logits -= logits.max(-1, keepdim=True).values
    choices = draw.Choices(
        greedy=np.zeros(7, np.bool_),
        top_k=rng.integers(1, 91, 7).astype(np.int32),
        top_p=rng.uniform(0.2, 1.0, 7),
        log_min_p=np.full(7, -np.inf, np.float32),
        keys=rng.integers(0, 1 << 63, 7).astype(np.uint64),
        logprobs=np.zeros(7, np.int8),
    )
    whole = draw_cuda.draw(logits, choices)
    monkeypatch.setattr(draw_cuda, "CHUNK", 180)
    torch.testing.assert_close(draw_cuda.draw(logits, choices), whole)
