"""Changes of logits by columns that lie on their device: grammars' bitmasks, and penalties on counted tokens.

In torch's operations, and on a GPU in Triton kernels, which serve once they have given the same. Nothing waits for the
device. Knows columns; knows no requests and no grammars.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.attention.triton import missing
from model_worker.device_copy import upload

log = logging.getLogger(__name__)

WORD_BITS = 32
_BLOCK = 1024
# Rows of the proof, and tokens of its vocabulary.
_PROOF_ROWS = 5
_PROOF_TOKENS = 3 * WORD_BITS + 7


class PenaltyColumns(NamedTuple):
    """Penalties of rows, on the host: repetition by `first`, then the others, then repetition by `last`."""

    frequency: NDArray[np.float32]
    presence: NDArray[np.float32]
    first: NDArray[np.float32]
    last: NDArray[np.float32]

    @property
    def packed(self) -> NDArray[np.float32]:
        """Return the columns [4, rows], for one copy."""
        return np.stack([column.astype(np.float32) for column in self])


@dataclass(frozen=True)
class Columns:
    """How logits are changed, `kernels` or operations."""

    kernels: bool = False

    def forbid(self, logits: torch.Tensor, index: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
        """Put -inf where bit t of a word is 0, in rows `index` of `logits`; `masks[i]` belongs to `index[i]`."""
        rows = upload(index, logits.device)
        words = upload(masks, logits.device)
        width = min(logits.shape[1], masks.shape[1] * WORD_BITS)
        if self.kernels and logits.stride(1) == 1:
            from model_worker.cuda.column_kernels import mask_kernel

            grid = (len(index), -(-width // _BLOCK))
            strides = logits.stride(0), words.stride(0), width, masks.shape[1]
            mask_kernel[grid](logits, rows, words, *strides, BLOCK=_BLOCK)
            return
        at = torch.arange(width, dtype=torch.int32, device=logits.device)
        allowed = (words[:, at // WORD_BITS] >> (at % WORD_BITS)) & 1
        found = logits[rows]
        found[:, :width].masked_fill_(allowed == 0, -torch.inf)
        logits[rows] = found

    def finish(self, tokens: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """Return `tokens`, and -1 where the largest logit of a row is not finite. `tokens` may be changed."""
        if not self.kernels or not len(tokens):
            return torch.where(torch.isfinite(top), tokens, -1)
        from model_worker.cuda import finish_kernel as kernels

        kernels.finish_kernel[(-(-len(tokens) // kernels.BLOCK),)](tokens, top, len(tokens), BLOCK=kernels.BLOCK)
        return tokens

    def keep(self, last_tokens: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put tokens into their places among the last ones of rows; 0 for a bad row."""
        if not self.kernels or not len(tokens):
            last_tokens.index_copy_(0, places, tokens.clamp(min=0))
            return
        from model_worker.cuda import finish_kernel as kernels

        grid = (-(-len(tokens) // kernels.BLOCK),)
        kernels.keep_kernel[grid](last_tokens, places, tokens, len(tokens), BLOCK=kernels.BLOCK)

    def penalise(
        self,
        logits: torch.Tensor,
        counts: torch.Tensor,
        index: NDArray[np.int64],
        slots: NDArray[np.int64],
        columns: PenaltyColumns,
    ) -> None:
        """Penalise tokens of which `counts[slots[i]]` is not 0, in row `index[i]` of the float32 `logits`."""
        places = upload(np.stack([index, slots]), logits.device)
        values = upload(columns.packed, logits.device)
        width = logits.shape[1]
        if self.kernels and logits.stride(1) == 1:
            from model_worker.cuda.column_kernels import penalty_kernel

            grid = (len(index), -(-width // _BLOCK))
            strides = logits.stride(0), counts.stride(0), width
            penalty_kernel[grid](logits, counts, places, *values, *strides, BLOCK=_BLOCK)
            return
        frequency, presence, first, last = values[:, :, None]
        number = counts[places[1]]
        before = logits[places[0]]
        after = torch.where(before < 0, before * first, before / first)
        after = after - (frequency.double() * number + presence.double()).float()
        after = torch.where(after < 0, after * last, after / last)
        logits[places[0]] = torch.where(number > 0, after, before)


OPERATIONS = Columns()


def proven(device: torch.device) -> Columns:
    """Return the columns of a GPU: kernels, if they give what operations give for random rows."""
    reason = missing()
    if reason is None:
        try:
            if all(_are_equal(device, dtype) for dtype in (torch.float32, torch.bfloat16)):
                return Columns(kernels=True)
            reason = "the kernels give other logits"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers and drivers have errors of their own
            reason = (str(error).splitlines() or [type(error).__name__])[0]
    log.warning("masks and penalties are applied by torch's operations: %s", reason)
    return OPERATIONS


def _are_equal(device: torch.device, dtype: torch.dtype) -> bool:
    rng = np.random.default_rng(0)
    rows, width = _PROOF_ROWS, _PROOF_TOKENS
    logits = torch.from_numpy(rng.normal(0, 3, (rows, width)).astype(np.float32)).to(device, dtype)
    index = rng.permutation(rows)[: rows - 1].astype(np.int64)
    masks = rng.integers(-(1 << 31), 1 << 31, (len(index), width // WORD_BITS), dtype=np.int64).astype(np.int32)
    counts = torch.from_numpy(rng.integers(0, 3, (rows, width)).astype(np.int32)).to(device)
    ones = np.ones(len(index), np.float32)
    penalties = PenaltyColumns(ones * 0.7, ones * -0.3, ones * 1.1, ones * 1.3)
    results = []
    for columns in (Columns(kernels=True), OPERATIONS):
        changed = logits.clone()
        columns.forbid(changed, index, masks)
        if dtype == torch.float32:
            columns.penalise(changed, counts, index, index[::-1].copy(), penalties)
        results.append(changed)
    return torch.allclose(results[0], results[1], rtol=1e-6, atol=1e-6) and _finish_alike(device, dtype)


def _finish_alike(device: torch.device, dtype: torch.dtype) -> bool:
    top = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, -3.0], dtype=dtype, device=device)
    places = torch.tensor([4, 0, 6, 2, 1], device=device)
    results = []
    for columns in (Columns(kernels=True), OPERATIONS):
        tokens = columns.finish(torch.arange(5, 10, device=device), top)
        last = torch.full((8,), 99, device=device)
        columns.keep(last, places, tokens)
        results.append(torch.cat([tokens, last]))
    return torch.equal(results[0], results[1])
