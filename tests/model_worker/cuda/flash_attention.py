"""FlashAttention 2 for a CPU, below torch's own functions: its meaning written out, and the checks of its C++.

What lies above it, `varlen_attn` and torch's operator for that, is torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: Tensor,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor,
    num_splits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`aten::_flash_attention_forward` for a paged cache, as its kernel's checks have it. Only the first is given."""
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == block_table.stride(-1) == 1
    assert cum_seq_q.dtype == cum_seq_k.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert cum_seq_q.is_contiguous()
    assert cum_seq_k.is_contiguous()
    assert seqused_k.is_contiguous()
    assert len(cum_seq_q) == len(cum_seq_k) == len(seqused_k) + 1 == len(block_table) + 1
    assert key.shape == value.shape
    assert key.shape[1] % 256 == 0
    assert key.shape[3] % 8 == 0
    assert key.shape[3] <= 256
    assert query.shape[1] % key.shape[2] == 0
    assert (dropout_p, return_debug_mask, alibi_slopes) == (0.0, False, None)
    assert num_splits == 1
    assert max_q >= int(cum_seq_q.diff().max())
    assert max_k >= int(seqused_k.max())
    assert cum_seq_k.diff().tolist() == seqused_k.tolist()
    group, parts = query.shape[1] // key.shape[2], []
    right = 0 if is_causal else window_size_right
    before, after = (int(side) if side >= 0 else 1 << 40 for side in (window_size_left, right))
    for i, (start, stop) in enumerate(zip(cum_seq_q.tolist(), cum_seq_q.tolist()[1:], strict=False)):
        count, length = stop - start, int(seqused_k[i])
        pages = block_table[i, : -(-length // key.shape[1])].tolist()
        k, v = (torch.cat([kv[p] for p in pages])[:length].float().repeat_interleave(group, 1) for kv in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), k) * scale
        at = torch.arange(count)[:, None] + length - count  # aligned to the end
        keys = torch.arange(length)[None]
        scores = scores.masked_fill((keys < at - before) | (keys > at + after), -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype))
    nothing = torch.empty(0)
    return torch.cat(parts), nothing, nothing, nothing, nothing


@contextmanager
def flash_attention() -> Iterator[None]:
    """Let a CPU have the operator within this context."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", written_out, "CPU")
        yield
