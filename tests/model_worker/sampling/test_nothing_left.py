"""Rows whose rules leave nothing, and rows with a NaN: a GPU's draw does as the host's, and other rows are as without
them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from interfaces import LogprobMode, LogprobReports, SamplingParams
from model_worker.grammar.apply_mask import apply_masks
from model_worker.sampling import draw_triton
from model_worker.sampling.ahead import Ahead
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.draw_triton import TritonDraw
from model_worker.sampling.sampler import SamplerRows
from tests.model_worker.cuda.interpreter import find_triton
from tests.model_worker.sampling.test_ahead import assert_alike

CPU = torch.device("cpu")
WIDTH = 75
STOPS = [3, 74]
ROWS = 10
FEW = 6
FREE, HELD = 9, 4  # positions: those that have a minimum length may end from 8 on
TEMPERED: dict[str, Any] = {"logprobs": LogprobMode.TEMPERED, "top_logprobs": 3}
WARPED: dict[str, Any] = {"logprobs": LogprobMode.WARPED, "top_logprobs": 3, "top_p": 0.9}


@pytest.fixture(params=["operations", "kernels"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TritonDraw | None:
    if request.param == "operations":
        return None
    find_triton()
    pytest.importorskip("triton", reason="triton is not installed (make setup-test)")
    for name, value in (("_BLOCK", 32), ("_BLOCKS", 2), ("_EDGE_BLOCK", 64), ("_ROOM", 32)):
        monkeypatch.setattr(draw_triton, name, value)
    return TritonDraw(CPU, WIDTH)


def wishes(rng: np.random.Generator) -> dict[str, Any]:
    """What a row asks for: some rules, often such that little is left of them."""
    tokens = rng.permutation(WIDTH).tolist()
    found: dict[str, Any] = {"temperature": float(rng.choice([0.0, 0.8])), "seed": int(rng.integers(1 << 40))}
    if rng.random() < 0.6:
        found["min_new_tokens"] = 6
    if rng.random() < 0.5:
        found["allowed_token_ids"] = [*tokens[:2], *STOPS[: rng.integers(3)]]
    if rng.random() < 0.4:
        found["bad_words"] = [[token] for token in tokens[: rng.choice([2, WIDTH])]]
    if rng.random() < 0.4:
        # The last one is -inf in float32.
        found["logit_bias"] = dict(zip(tokens[:3], (2.0, -3.0, -1e39), strict=True))
    if rng.random() < 0.3:
        found["repetition_penalty"] = 1.3
    reports: dict[str, Any] = ({}, TEMPERED, WARPED)[rng.integers(3)]
    return found | reports


def spoil(rng: np.random.Generator, row: torch.Tensor, values: dict[str, Any]) -> None:
    """Take tokens from a row of logits: those that its rules leave, all but its ends, all; or make one a NaN."""
    allowed = values.get("allowed_token_ids", [])
    kind = rng.integers(7)
    if kind in (0, 1):
        row[allowed] = -torch.inf
    elif kind in (2, 3):
        ends = row[STOPS].clone()
        row[:] = -torch.inf
        row[STOPS] = ends
    elif kind == 4:
        row[:] = -torch.inf
    elif kind == 5:
        row[[*allowed, int(rng.integers(WIDTH))][0]] = torch.nan


def read(ahead: Ahead) -> tuple[np.ndarray, np.ndarray | None, LogprobReports | None]:
    return ahead.read(ahead.memory.numpy())


def test_a_device_gives_way_where_the_host_does(kernels: TritonDraw | None) -> None:
    rng = np.random.default_rng()
    host, device = SamplerRows(ROWS, WIDTH, CPU), SamplerRows(ROWS, WIDTH, CPU, counts_there=True)
    device.use_kernels(kernels)
    asked = [TEMPERED | {"temperature": 0.0}, *(wishes(rng) for _ in range(ROWS - 1))]
    text = rng.integers(0, WIDTH, 2).astype(np.int32)
    for row, values in enumerate(asked):
        for sampler in (host, device):
            with np.errstate(over="ignore"):
                sampler.join(row, SamplingParams(stop_token_ids=STOPS, **values), STOPS, text, text)
    rows, positions = np.arange(ROWS, dtype=np.int32), np.where(rng.random(ROWS) < 0.3, FREE, HELD)
    logits = torch.from_numpy(rng.normal(0, 3, (ROWS, WIDTH)).astype(np.float32))
    for row, values in enumerate(asked):
        spoil(rng, logits[row], values)
    # A grammar leaves a few tokens: the ends among them, or not.
    index = rng.permutation(ROWS)[:4].astype(np.int64)
    masks = np.zeros((len(index), 3), np.int32)
    masks[:, 0] = rng.choice([1 << STOPS[0], 1 << 9 | 1 << 30], len(index))
    ruled = logits.clone()
    apply_masks(ruled, index, masks)
    want = host.sample(ruled, rows, positions)
    bad = np.zeros(ROWS, np.bool_) if want.bad is None else want.bad
    tokens, logprobs, reports = read(device.sample_ahead(logits.clone(), rows, positions, None, RowMasks(index, masks)))
    np.testing.assert_array_equal(tokens, np.where(bad, -1, want.tokens))
    assert logprobs is not None
    assert want.logprobs is not None
    np.testing.assert_allclose(logprobs[~bad], want.logprobs[~bad], rtol=1e-5, atol=1e-6)
    if (~bad[[row for row, values in enumerate(asked) if "top_logprobs" in values]]).any():
        assert want.reports is not None
        assert reports is not None
        kept = ~np.isin(want.reports.owners, rows[bad])
        assert_alike(reports.select(kept), want.reports.select(kept))


def test_a_row_of_which_nothing_is_left_costs_others_nothing(kernels: TritonDraw | None) -> None:
    """Tokens and reports of the others have the same bits with a NaN, infinities or nothing in their neighbours."""
    rng = np.random.default_rng()
    sampler = SamplerRows(FEW, WIDTH, CPU, counts_there=True)
    sampler.use_kernels(kernels)
    text = rng.integers(0, WIDTH, 2).astype(np.int32)
    for row in range(FEW):
        values: dict[str, Any] = ({"temperature": 0.0}, {"top_k": 9}, WARPED)[row % 3]
        params = SamplingParams(seed=row, **values)
        sampler.join(row, params, [], text, text)
    rows, positions = np.arange(FEW, dtype=np.int32), np.full(FEW, 5)
    logits = torch.from_numpy(rng.normal(0, 3, (FEW, WIDTH)).astype(np.float32))
    spoiled = logits.clone()
    broken = rng.permutation(FEW)[:3]
    spoiled[broken[0], int(rng.integers(WIDTH))] = torch.nan
    spoiled[broken[1], int(rng.integers(WIDTH))] = torch.inf
    spoiled[broken[2]] = -torch.inf
    found = [read(sampler.sample_ahead(each, rows, positions)) for each in (logits, spoiled)]
    (tokens, logprobs, reports), (other, other_logprobs, other_reports) = found
    assert (other[broken] == -1).all()
    others = ~np.isin(rows, broken)
    np.testing.assert_array_equal(other[others], tokens[others])
    assert logprobs is not None
    assert other_logprobs is not None
    np.testing.assert_array_equal(other_logprobs[others], logprobs[others])
    assert reports is not None
    assert other_reports is not None
    first, second = (each.select(np.isin(each.owners, rows[others])) for each in (reports, other_reports))
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.values, second.values)
    assert "no token can be chosen" in sampler.why_bad(int(broken[0]))
