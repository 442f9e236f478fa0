"""What a device draws by itself equals what the host draws: penalties, biases, restrictions and log-probabilities."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from interfaces import LogprobMode, LogprobReports, SamplingParams
from model_worker.grammar.apply_mask import apply_masks
from model_worker.sampling import ahead, draw_triton
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.draw_triton import TritonDraw
from model_worker.sampling.sampler import SamplerRows
from tests.model_worker.cuda.interpreter import find_triton

VOCAB = 70
CPU = torch.device("cpu")
STOPS = [3, 9]


def kinds(rng: np.random.Generator) -> list[dict[str, Any]]:
    """The wishes of rows, each with something else."""
    ids = rng.permutation(VOCAB).tolist()
    return [
        {"frequency_penalty": 0.8, "presence_penalty": -0.4},
        {"temperature": 0.0, "repetition_penalty": 1.7},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.6, "penalize_prompt": True, "top_k": 20},
        {"logit_bias": {ids[0]: 4.0, ids[1]: -9.0}, "min_new_tokens": 4, "top_p": 0.9},
        {"temperature": 0.0, "allowed_token_ids": ids[:5], "min_new_tokens": 2},
        {"bad_words": [[ids[3]], [ids[4]]], "logprobs": LogprobMode.TEMPERED},
        {"temperature": 0.0, "logprobs": LogprobMode.TEMPERED, "top_logprobs": 4},
        {"temperature": 0.7, "top_k": 6, "logprobs": LogprobMode.WARPED, "top_logprobs": 9, "logprob_ids": ids[5:8]},
        {"top_p": 0.8, "min_p": 0.05, "logprobs": LogprobMode.TEMPERED, "logprob_ids": ids[8:9]},
        {"temperature": 0.0},
        {},
        # Nothing is left of what is allowed: until the row may end, always, and of all tokens.
        {"allowed_token_ids": STOPS[:1], "min_new_tokens": 4, "logprobs": LogprobMode.WARPED, "top_logprobs": 64},
        {"allowed_token_ids": ids[9:11], "bad_words": [[ids[9]], [ids[10]]], "temperature": 0.0},
        {"bad_words": [[token] for token in ids], "logit_bias": {ids[11]: 3.0}},
        {"logit_bias": {ids[12]: 2.0}, "bad_words": [[ids[13]]], "min_new_tokens": 3, "repetition_penalty": 1.2}
        | {"top_k": 12, "logprobs": LogprobMode.WARPED, "top_logprobs": 20, "logprob_ids": ids[14:]},
        {"top_k": 1, "logprobs": LogprobMode.WARPED, "top_logprobs": 2, "presence_penalty": 1.0},
    ]


def assert_alike(got: LogprobReports | None, want: LogprobReports | None) -> None:
    assert got is not None
    assert want is not None
    for field in dataclasses.fields(want):
        name = field.name
        found, column = getattr(got, name), getattr(want, name)
        if name in ("chosen", "values"):
            np.testing.assert_allclose(found, column, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, column, name)


@pytest.mark.parametrize("kernels", [False, True], ids=["operations", "kernels"])
def test_steps_drawn_ahead_equal_the_hosts(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels:
        find_triton()
        pytest.importorskip("triton", reason="triton is not installed (make setup-test)")
        for name, value in (("_BLOCK", 32), ("_BLOCKS", 2), ("_EDGE_BLOCK", 64), ("_ROOM", 32)):
            monkeypatch.setattr(draw_triton, name, value)
    # So that reports come in several parts.
    monkeypatch.setattr(ahead, "CHUNK", 2 * VOCAB)
    rng = np.random.default_rng()
    wishes = kinds(rng)
    rows = rng.permutation(len(wishes)).astype(np.int32)
    host, device = SamplerRows(len(rows), VOCAB, CPU), SamplerRows(len(rows), VOCAB, CPU, counts_there=True)
    device.use_kernels(TritonDraw(CPU, VOCAB) if kernels else None)
    last_tokens = torch.full((len(rows),), 99)
    prompts = [rng.integers(0, VOCAB, 7).astype(np.int32) for _ in rows]
    for row, prompt, values in zip(rows.tolist(), prompts, wishes, strict=True):
        params = SamplingParams(seed=int(rng.integers(1 << 40)), stop_token_ids=STOPS, **values)
        for sampler in (host, device):
            sampler.join(row, params, STOPS, prompt, prompt[:2])
    assert not device.waits(rows)
    # Interpreted kernels are slow.
    steps = 3 if kernels else 6
    for step in range(steps):
        # Ties, too.
        logits = torch.from_numpy(rng.normal(0, 3, (len(rows), VOCAB)).astype(np.float32))
        logits[::2] = logits[::2].round()
        if step == steps - 1:
            logits[rng.integers(len(rows)), 2] = torch.nan
        masks = rng.integers(-(1 << 31), 1 << 31, (len(rows) // 2, 3), dtype=np.int64).astype(np.int32)
        masks[:3] = [1 << STOPS[0], 0, 0]  # nothing but the end
        index = rng.permutation(len(rows))[: len(masks)].astype(np.int64)
        there = logits.clone()
        apply_masks(logits, index, masks)
        positions = np.full(len(rows), 9 + step, np.int64)
        want = host.sample(logits, rows, positions)
        launched = device.sample_ahead(there, rows, positions, None, RowMasks(index, masks), last_tokens)
        tokens, logprobs, reports = launched.read(launched.memory.numpy())
        bad = np.zeros(len(rows), np.bool_) if want.bad is None else want.bad
        np.testing.assert_array_equal(tokens, np.where(bad, -1, want.tokens))
        np.testing.assert_array_equal(last_tokens[rows], want.tokens)
        assert logprobs is not None
        assert want.logprobs is not None
        np.testing.assert_allclose(logprobs[~bad], want.logprobs[~bad], rtol=1e-5, atol=1e-6)
        assert want.reports is not None
        assert reports is not None
        kept = ~np.isin(want.reports.owners, rows[bad])
        assert_alike(reports.select(kept), want.reports.select(kept))


def test_a_table_of_counts_grows_and_is_used_again() -> None:
    rows = 11
    sampler, fresh = (SamplerRows(rows, VOCAB, CPU, counts_there=True) for _ in range(2))
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    rng = np.random.default_rng()
    texts = rng.integers(0, VOCAB, (rows, 12)).astype(np.int32)
    for row in range(rows):
        sampler.join(row, params, [], texts[row], texts[row])
    for row in range(0, rows, 2):
        sampler.drop(row)
    for row in range(0, rows, 2):
        sampler.join(row, params, [], texts[row], texts[row])
        sampler.follow(row, [5, 5])
    for row in range(rows):
        emitted = texts[row] if row % 2 else np.append(texts[row], [5, 5]).astype(np.int32)
        fresh.join(row, params, [], texts[row], emitted)
    logits = torch.from_numpy(rng.normal(size=(rows, VOCAB)).astype(np.float32))
    columns_of_step = np.arange(rows, dtype=np.int32), np.full(rows, 20, np.int64)
    got, want = (each.sample_ahead(logits, *columns_of_step).tokens for each in (sampler, fresh))
    assert torch.equal(got, want)


def test_a_device_without_memory_for_counts_refuses_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = SamplerRows(2, VOCAB, CPU, counts_there=True)

    def none_left(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", none_left)
    text = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=r"no memory to count tokens for penalties .*leave the penalties out"):
        sampler.join(0, SamplingParams(presence_penalty=1.0), [], text, text)
    sampler.join(0, SamplingParams(), [], text, text)
