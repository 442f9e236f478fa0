"""Whether the draw's kernels give, on this device, what torch's operations give: masks, penalties, tokens and counts.

Knows two samplers of one device, and random logits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from interfaces import SamplingParams
from model_worker.attention.triton import missing
from model_worker.sampling.columns import WORD_BITS
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.draw_triton import TritonDraw

if TYPE_CHECKING:
    from model_worker.sampling.sampler import SamplerRows

log = logging.getLogger(__name__)

# What the rows of the proof ask for. Some of them have a mask.
_WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 200, "top_p": 0.95, "min_p": 0.001},
    {"temperature": 1.0, "top_p": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {1: 5.0, 2: -1.0}},
)
ROWS = len(_WISHES)
# Without changes logits are read as they are, and with them as float32: kernels are compiled for both.
_UNCHANGED = [not any("penalty" in name or "bias" in name for name in wish) for wish in _WISHES]


def proven(
    device: torch.device, plain: SamplerRows, other: SamplerRows, dtype: torch.dtype = torch.float32
) -> TritonDraw | None:
    """Return the kernels, if they give the other sampler what operations give the plain one; both are of ROWS rows.

    The kernels that logits of `dtype` want are compiled then.
    """
    reason = missing()
    if reason is None:
        try:
            kernels = TritonDraw(device, plain.vocab_size)
            other.use_kernels(kernels)
            if _draw_alike(plain, other, device, dtype):
                return kernels
            reason = "the kernels draw other tokens"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers and drivers have errors of their own
            reason = (str(error).splitlines() or [type(error).__name__])[0]
    log.warning("tokens are drawn by torch's operations, which sort: %s", reason)
    return None


def _draw_alike(plain: SamplerRows, other: SamplerRows, device: torch.device, dtype: torch.dtype) -> bool:
    rng = np.random.default_rng(0)
    width = plain.vocab_size
    for row in range(ROWS):
        params = SamplingParams(seed=int(rng.integers(1 << 40)), **_WISHES[row])
        tokens = rng.integers(0, width, 64).astype(np.int32)
        for sampler in (plain, other):
            sampler.join(row, params, [], tokens[:32], tokens)
    last_tokens = [torch.zeros(ROWS, dtype=torch.int64, device=device) for _ in range(2)]
    everyone = rng.permutation(ROWS).astype(np.int32)
    for step, rows in enumerate((np.flatnonzero(_UNCHANGED).astype(np.int32), everyone, everyone[::-1].copy())):
        count = len(rows)
        # Peaked and flat rows, and some of few different logits, which are equal at edges.
        logits = rng.normal(0, 1, (count, width)) * np.geomspace(0.1, 8, count)[:, None]
        logits[::4] = np.round(logits[::4])
        if step == 2:
            logits[3, width // 2] = np.nan
        words = rng.integers(-(1 << 31), 1 << 31, (3, width // WORD_BITS), dtype=np.int64).astype(np.int32)
        masks = RowMasks(rng.permutation(count)[:3].astype(np.int64), words) if step < 2 else None
        tensor = torch.from_numpy(logits.astype(np.float32)).to(device, dtype)
        positions = np.full(count, 64 + step, np.int64)
        found = [
            sampler.sample_ahead(tensor.clone(), rows, positions, None, masks, last).tokens
            for sampler, last in zip((plain, other), last_tokens, strict=True)
        ]
        if not torch.equal(*found):
            return False
    return torch.equal(*last_tokens)
