"""Whether the draw's kernels give, on this device, what torch's operations give: masks, penalties, rules on tokens,
tokens, counts, and log-probabilities.

Knows two samplers of one device, and random logits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobMode, LogprobReports, SamplingParams
from model_worker.attention.triton import missing
from model_worker.sampling.columns import WORD_BITS
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.draw_triton import TritonDraw

if TYPE_CHECKING:
    from model_worker.sampling.sampler import SamplerRows

log = logging.getLogger(__name__)

_REPORTED_TOPS: dict[str, Any] = {"logprobs": LogprobMode.TEMPERED, "top_logprobs": 20}
# What the rows of the proof ask for. Where logits change, what is reported shows by how much.
_WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 200, "top_p": 0.95, "min_p": 0.001},
    {"temperature": 1.0, "top_p": 0.8, "frequency_penalty": 0.7, "presence_penalty": -1.5, **_REPORTED_TOPS},
    {"temperature": 0.0, "repetition_penalty": 3.0, **_REPORTED_TOPS},
    {"temperature": 1.0, "logit_bias": {1: 5.0, 2: -1.0}, "logprobs": LogprobMode.TEMPERED, "logprob_ids": (1, 2)},
    {"temperature": 1.0, "allowed_token_ids": [3, 1, 7, 9], "bad_words": [[7]], "min_new_tokens": 99},
    {"temperature": 0.0, **_REPORTED_TOPS},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": LogprobMode.WARPED, "top_logprobs": 20, "logprob_ids": (0, 5)},
    {"temperature": 0.8, "top_k": 50, "logprobs": LogprobMode.WARPED},
)
ROWS = len(_WISHES)
_STOPS = [2, 9]
_GREEDY, _PLAIN, _COUNTED = (0,), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 6, 7)
_RULED, _REPORTED = (0, 1, 8, 9), (0, 1, 10, 11, 12)
# The rows of each step, and whether some have masks. In most no row is drawn, or nothing changes logits: kernels then
# take other branches, and read logits of the model's type.
_STEPS: tuple[tuple[tuple[int, ...], bool], ...] = (
    (_GREEDY, False),
    (_GREEDY, True),
    (_PLAIN, False),
    (_PLAIN, True),
    (_COUNTED, False),
    (_COUNTED, True),
    ((0, 9), False),
    (_RULED, False),
    (_RULED, True),
    (_REPORTED, False),
    ((10, 9, 7, 12), True),
)
# Padding behind the vocabulary's logits, in every second step. It is a multiple of 16, since Triton compiles other
# kernels for strides that are not.
_BEHIND = 16
_UNUSED = 99.0
# Tokens that a row has seen, some of them often, and what is added to their logits: penalties then change the draw.
_SEEN_TOKENS = 24
_SEEN = 4.0
# Largest difference of log-probabilities, which are sums in another order.
_MOST_DIFFERENCE = 1e-4


def proven(
    device: torch.device, plain: SamplerRows, other: SamplerRows, dtype: torch.dtype = torch.float32
) -> TritonDraw | None:
    """Return the kernels, if they give the other sampler what operations give the plain one; both are of ROWS rows.

    The kernels that logits of `dtype` want are compiled then.
    """
    reason = missing()
    if reason is None:
        try:
            kernels = TritonDraw(device, plain.vocab_size, _reads_host_memory(device))
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
    pools = np.stack([rng.choice(width, _SEEN_TOKENS, replace=False) for _ in range(ROWS)])
    seen = np.take_along_axis(pools, rng.integers(0, _SEEN_TOKENS, (ROWS, 64)), 1).astype(np.int32)
    for row in range(ROWS):
        params = SamplingParams(seed=int(rng.integers(1 << 40)), **_WISHES[row])
        for sampler in (plain, other):
            sampler.join(row, params, _STOPS, seen[row, :32], seen[row])
    last_tokens = [torch.full((ROWS,), -1, device=device) for _ in range(2)]
    for step, (held, masked) in enumerate(_STEPS):
        rows = rng.permutation(held).astype(np.int32)
        logits = _logits(rng, len(rows), width, padded=step % 2 == 1)
        np.put_along_axis(logits, pools[rows], np.take_along_axis(logits, pools[rows], 1) + _SEEN, 1)
        words = rng.integers(-(1 << 31), 1 << 31, (3, width // WORD_BITS), dtype=np.int64).astype(np.int32)
        places = rng.permutation(len(rows))[:3].astype(np.int64)
        masks = RowMasks(places, words[: len(places)]) if masked else None
        tensor = torch.from_numpy(logits).to(device, dtype)
        positions = np.full(len(rows), 64 + step, np.int64)
        found = [
            sampler.sample_ahead(tensor.clone(), rows, positions, None, masks, last)
            for sampler, last in zip((plain, other), last_tokens, strict=True)
        ]
        (tokens, chosen, want), (drawn, other_chosen, got) = (ahead.read(ahead.memory.cpu().numpy()) for ahead in found)
        if not (np.array_equal(tokens, drawn) and torch.equal(*last_tokens)):
            return False
        if not _chosen_alike(chosen, other_chosen, tokens >= 0):
            return False
        if not _reported_alike(want, got, rows[tokens >= 0]):
            return False
    return True


def _chosen_alike(want: NDArray[np.float32] | None, got: NDArray[np.float32] | None, good: NDArray[np.bool_]) -> bool:
    """Whether good rows have the same log-probabilities of their tokens, NaN where none was asked for."""
    if want is None or got is None:
        return want is got
    return np.allclose(want[good], got[good], rtol=0, atol=_MOST_DIFFERENCE, equal_nan=True)


def _reported_alike(want: LogprobReports | None, got: LogprobReports | None, rows: NDArray[np.int32]) -> bool:
    """Whether rows have the same reports. Those of others, which are bad, are anything."""
    if want is None or got is None:
        return want is got
    first, second = (each.select(np.isin(each.owners, rows)) for each in (want, got))
    same = all(np.array_equal(getattr(first, name), getattr(second, name)) for name in ("owners", "counts", "ids"))
    return same and all(
        np.allclose(getattr(first, name), getattr(second, name), rtol=0, atol=_MOST_DIFFERENCE)
        for name in ("chosen", "values")
    )


def _reads_host_memory(device: torch.device) -> bool:
    """Whether a kernel can read pinned memory of the host. The log says why bitmasks are copied instead."""
    from model_worker.cuda.words_kernel import words_arrive

    try:
        arrive = words_arrive(device)
        reason = "it reads other words there"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # drivers have errors of their own
        arrive = False
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    if not arrive:
        log.warning("bitmasks of grammars are copied to the device, which cannot read the host's memory: %s", reason)
    return arrive


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
