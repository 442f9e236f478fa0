"""Triton's draw, interpreted on the CPU, draws the tokens that the sampler draws with the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from interfaces import SamplingParams
from model_worker.sampling import draw, draw_cuda, draw_triton
from model_worker.sampling.sampler import SamplerRows
from tests.model_worker.cuda.interpreter import need_triton

need_triton()

EMPTY = np.empty(0, np.int32)
ROWS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 30},
    {"temperature": 1.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.2, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_p": 0.01},
    {"temperature": 0.0},
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that narrow rows have several parts, and not all of a row fits into the scratch memory."""
    monkeypatch.setattr(draw_triton, "_BLOCK", 128)
    monkeypatch.setattr(draw_triton, "_BLOCKS", 2)
    monkeypatch.setattr(draw_triton, "_ROOM", 128)
    monkeypatch.setattr(draw_triton, "_PROOF_ROWS", 6)


@pytest.mark.parametrize(("width", "levels"), [(5, None), (700, None), (700, 4), (300, 1)])
def test_tokens_equal_the_samplers(width: int, levels: int | None) -> None:
    """`levels` is how many different logits there are, so that many are equal at the edges."""
    rng = np.random.default_rng()
    sampler = SamplerRows(len(ROWS), width, torch.device("cpu"))
    held = rng.permutation(len(ROWS)).astype(np.int32)
    for row, values in zip(held.tolist(), ROWS, strict=True):
        sampler.join(row, SamplingParams(seed=int(rng.integers(1 << 40)), **values), [], EMPTY, EMPTY)
    logits = rng.normal(0, 3, (len(ROWS), width)) if levels is None else rng.integers(0, levels, (len(ROWS), width))
    table = torch.from_numpy(logits.astype(np.float32))
    table[1, rng.random(width) < 0.3] = -torch.inf
    table[1, 0] = 1.0
    table[4, rng.integers(width)] = torch.nan
    positions = rng.integers(0, 1 << 20, len(ROWS))
    want = sampler.sample(table.clone(), held, positions)
    assert want.bad is not None
    sampler._device_draw.draw_tokens = draw_triton.draw
    got = sampler.sample_ahead(table, held, positions).tokens.numpy()
    np.testing.assert_array_equal(got, np.where(want.bad, -1, want.tokens))


def choices_of(rows: int, width: int, top_p: float, keys: np.ndarray) -> draw.Choices:
    return draw.Choices(
        greedy=np.zeros(rows, np.bool_),
        top_k=np.full(rows, width, np.int32),
        top_p=np.full(rows, top_p),
        log_min_p=np.full(rows, -np.inf, np.float32),
        keys=keys,
        logprobs=np.zeros(rows, np.int8),
    )


def test_tokens_come_in_proportion_to_their_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fixed keys, so that it cannot fail by chance."""
    monkeypatch.setattr(draw_triton, "_BLOCK", 16)
    monkeypatch.setattr(draw_triton, "_BLOCKS", 1)
    rows, width = 200, 5
    logits = torch.linspace(-1.5, 0, width)
    keys = np.random.default_rng(5).integers(0, 1 << 63, rows).astype(np.uint64)
    tokens = draw_triton.draw(logits.expand(rows, width), choices_of(rows, width, 1.0, keys))
    counts = np.bincount(tokens.numpy(), minlength=width)
    expected = logits.double().softmax(0).numpy() * rows
    assert stats.chisquare(counts, expected).pvalue > 0.01


def test_a_device_whose_kernels_draw_otherwise_uses_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cpu")
    assert draw_triton.proven(device, 600) is draw_triton.draw
    assert not caplog.text
    monkeypatch.setattr(draw_triton, "draw", lambda scaled, choices: draw_cuda.draw(scaled, choices) + 1)
    assert draw_triton.proven(device, 600) is draw_cuda.draw
    assert "the kernels draw other tokens" in caplog.text

    def fails(scaled: torch.Tensor, choices: draw.Choices) -> torch.Tensor:
        raise TypeError("no such compiler\nand more")

    monkeypatch.setattr(draw_triton, "draw", fails)
    assert draw_triton.proven(device, 600) is draw_cuda.draw
    assert "no such compiler" in caplog.text
