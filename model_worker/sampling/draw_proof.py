"""Whether the draw's kernels give, on this device, what torch's operations give: masks, penalties, tokens and counts.

Knows two samplers of one device, and random logits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import SamplingParams
from model_worker.attention.triton import missing
from model_worker.sampling.columns import WORD_BITS
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.draw_triton import TritonDraw

if TYPE_CHECKING:
    from model_worker.sampling.sampler import SamplerRows

log = logging.getLogger(__name__)

# What the rows of the proof ask for.
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
_GREEDY, _PLAIN, _COUNTED, _RULED = (0,), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 8)
# The rows of each step, and whether some have masks. In most no row is drawn, or nothing changes logits: kernels then
# take other branches, and read logits of the model's type.
_STEPS: tuple[tuple[tuple[int, ...], bool], ...] = (
    (_GREEDY, False),
    (_GREEDY, True),
    (_PLAIN, False),
    (_PLAIN, True),
    (_COUNTED, False),
    (_COUNTED, True),
    ((0, 7), False),
    (_RULED, False),
    (_RULED, True),
)
# Padding behind the vocabulary's logits, in every second step. It is a multiple of 16, since Triton compiles other
# kernels for strides that are not.
_BEHIND = 16
_UNUSED = 99.0


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
    for step, (held, masked) in enumerate(_STEPS):
        rows = rng.permutation(held).astype(np.int32)
        logits = _logits(rng, len(rows), width, padded=step % 2 == 1)
        words = rng.integers(-(1 << 31), 1 << 31, (3, width // WORD_BITS), dtype=np.int64).astype(np.int32)
        places = rng.permutation(len(rows))[:3].astype(np.int64)
        masks = RowMasks(places, words[: len(places)]) if masked else None
        tensor = torch.from_numpy(logits).to(device, dtype)
        positions = np.full(len(rows), 64 + step, np.int64)
        found = [
            sampler.sample_ahead(tensor.clone(), rows, positions, None, masks, last).tokens
            for sampler, last in zip((plain, other), last_tokens, strict=True)
        ]
        if not (torch.equal(*found) and torch.equal(*last_tokens)):
            return False
    return True


def _logits(rng: np.random.Generator, rows: int, width: int, padded: bool) -> NDArray[np.float32]:
    """Draw peaked and flat rows, and some of few different logits, which are equal at edges. Of several that are
    padded one has a NaN."""
    logits = rng.normal(0, 1, (rows, width)) * np.geomspace(0.1, 8, rows)[:, None]
    logits[::4] = np.round(logits[::4])
    if padded:
        if rows > 1:
            logits[rows // 2, width // 2] = np.nan
        logits = np.pad(logits, ((0, 0), (0, _BEHIND)), constant_values=_UNUSED)
    return logits.astype(np.float32)
