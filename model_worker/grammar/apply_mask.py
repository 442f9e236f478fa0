"""Applies token bitmasks: -inf on the logits of forbidden tokens. Bit t of a row's mask is set where token t is
allowed.

On a CPU a kernel skips the words of the mask in which all tokens are allowed, which torch's own masking does not. Knows
bits and logits; knows no grammar.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.device_copy import upload_together
from model_worker.sampling.columns import WORD_BITS, forbid

# -inf of each type; as its 16 bits where numpy has no such type.
_INFINITY: dict[torch.dtype, Any] = {
    torch.float32: np.float32(-np.inf),
    torch.bfloat16: np.int16(-0x80),
    torch.float16: np.int16(-0x400),
}


def apply_masks(
    logits: torch.Tensor, index: NDArray[np.int64], masks: NDArray[np.int32], has_kernels: bool = True
) -> None:
    """Apply masks in place, in the rows `index` of `logits`; `masks[i]` belongs to `index[i]`.

    On a GPU nothing waits for it.
    """
    infinity = _INFINITY.get(logits.dtype)
    with torch.inference_mode():
        if logits.device.type == "cpu" and infinity is not None and has_kernels:
            plain = logits if logits.dtype == torch.float32 else logits.view(torch.int16)
            _forbid_rows(plain.numpy(), index, masks, infinity)
            return
        rows, words = upload_together([index, masks], logits.device)
        forbid(logits, rows, words)


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernel, or load it from the cache."""
    apply_masks(torch.zeros((1, WORD_BITS), dtype=dtype), np.zeros(1, np.int64), np.zeros((1, 1), np.int32))


@numba.njit(cache=True, nogil=True)
def _forbid_rows(
    logits: NDArray[np.generic], index: NDArray[np.int64], masks: NDArray[np.int32], infinity: Any
) -> None:
    width = logits.shape[1]
    for i in range(len(index)):
        row = logits[index[i]]
        for word in range(min(masks.shape[1], -(-width // WORD_BITS))):
            bits = masks[i, word]
            start = word * WORD_BITS
            if bits == -1:
                continue
            for bit in range(min(WORD_BITS, width - start)):
                if not (bits >> bit) & 1:
                    row[start + bit] = infinity
