"""Launches that are repeated in one process, without a wait between them: a race shows as another result.

Programs of these kernels count themselves to find the last one of a product's pieces, and of a row whose rules leave
nothing; or they write and read what others of the same program have written. Knows kernels and random inputs; does not
know the hour that asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_products import four_bits
from interfaces import LogprobMode, SamplingParams
from model_worker.adapters import slots
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.draw_triton import TritonDraw
from model_worker.sampling.sampler import SamplerRows

REPEATS = 200
_REPORTED: dict[str, Any] = {"logprobs": LogprobMode.WARPED, "top_logprobs": 5}
# What rows ask for. Of the last two nothing is left by their rules, so that the last program of the row does it again.
_WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9, **_REPORTED},
    {"temperature": 1.0, "logit_bias": {1: 5.0}, **_REPORTED},
    {"temperature": 0.0, "allowed_token_ids": [7, 8]},
    {"temperature": 1.0, "bad_words": [[7], [8]], "min_new_tokens": 9},
)
ROWS = len(_WISHES)
_LEFT = (7, 8)

Launch = Callable[[], Tensor]


def launches(
    device: torch.device, dtype: torch.dtype, inputs: int, width: int, tokens: tuple[int, ...]
) -> dict[str, Launch]:
    """Return launches by name. Each gives the same bits each time, or has a race.

    Products have so many `inputs` and `tokens`, and draws a vocabulary of `width` tokens.
    """
    linear = four_bits(66, inputs, 128, torch.device("cpu")).to(device)
    found: dict[str, Launch] = {}
    for count in tokens:
        x = torch.randn(count, inputs, device=device, dtype=dtype)
        found[f"four bits in pieces, {count} tokens"] = lambda x=x: linear(x)  # type: ignore[misc]
    for kind, (launch, _) in zip(
        ("decode rows", "prompts", "vectors of decode rows", "vectors of prompts"),
        slots.trials(device, dtype),
        strict=True,
    ):
        found[f"adapters, {kind}"] = launch
    found["draw"] = draw(device, dtype, width)
    return found


def draw(device: torch.device, dtype: torch.dtype, width: int, by_kernels: bool = True) -> Launch:
    """Return the launch of a draw, by kernels or by torch's operations: tokens, and behind them what is reported."""
    rng = np.random.default_rng(0)
    sampler = SamplerRows(ROWS, width, device, counts_there=True)
    sampler.use_kernels(TritonDraw(device, width) if by_kernels else None)
    none = np.empty(0, np.int32)
    for row, wishes in enumerate(_WISHES):
        sampler.join(row, SamplingParams(seed=row, **wishes), list(_LEFT[:1]), none, none)
    logits = rng.normal(0, 3, (ROWS, width)).astype(np.float32)
    logits[-2, list(_LEFT)] = -np.inf
    logits[-1] = np.where(np.isin(np.arange(width), _LEFT), logits[-1], -np.inf)
    source = torch.from_numpy(logits).to(device, dtype)
    rows, positions = np.arange(ROWS, dtype=np.int32), np.zeros(ROWS, np.int64)
    words = rng.integers(-(1 << 31), 1 << 31, (1, width // 32), dtype=np.int64).astype(np.int32)
    masks = RowMasks(np.zeros(1, np.int64), words)
    # Masks change the logits.
    return lambda: sampler.sample_ahead(source.clone(), rows, positions, None, masks).memory


def unequal(cases: Mapping[str, Launch], repeats: int) -> list[str]:
    """Launch each case so many times, and say of which results are not those of the first launch."""
    wrong = []
    for name, launch in cases.items():
        first = launch().clone()
        differ = torch.stack([(launch() != first).any() for _ in range(repeats - 1)])
        if count := int(differ.sum()):
            wrong.append(f"{name}: {count} of {repeats} results differ")
    return wrong
