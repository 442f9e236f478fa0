"""A plain-torch reader and writer of the fused stack's tiled KV layout, for batches that the stack cannot compute.

A sequence may have such batches (images that see later keys) and others. The layout of a block is cache_dot.py's: for
each head K as `[element step, token]` and V as `[token step, element]`, in words of one float32 or of two bfloat16.
"""

from __future__ import annotations

from torch import Tensor

from model_worker.attention.reference import attend_to
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import AttentionParams, KVCache

_WORD_BYTES = 4


class TiledCache:
    """Views of a CPU's `cache`, on the same memory, in the stack's order."""

    def __init__(self, cache: KVCache) -> None:
        # k [block, offset, head, element step, part of it], v [block, token step, part of it, head, element]
        self.k = [_cut(blocks, 3).permute(0, 3, 1, 2, 4) for blocks in cache.k]
        self.v = [_cut(blocks, 1).permute(0, 2, 4, 1, 3) for blocks in cache.v]

    def write(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        """Write K and V as KVCache.write. The kernels multiply what lies beyond a sequence's end by zero: it must be
        a number."""
        steps, part = self.k[layer].shape[3:]
        self.k[layer].index_put_((batch.slot_block, batch.slot_offset), k.unflatten(2, (steps, part)))
        places = (batch.slot_block, batch.slot_offset // part, batch.slot_offset % part)
        self.v[layer].index_put_(places, v.nan_to_num())


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Attend with T queries to TiledCache's views of one layer."""

    def gather(blocks: Tensor) -> tuple[Tensor, Tensor]:
        return k_cache[blocks].flatten(3).flatten(0, 1), v_cache[blocks].flatten(0, 2)

    return attend_to(q, v_cache.shape[-1], batch, params, gather)


def _cut(blocks: Tensor, dim: int) -> Tensor:
    """View memory of [block, offset, head, element] on a CPU as [block, head, steps along `dim`, the other one,
    part]."""
    count, size, heads, elements = blocks.shape
    part = _WORD_BYTES // blocks.element_size()
    steps, others = (elements // part, size) if dim == 3 else (size // part, elements)
    return blocks.transpose(1, 2).view(count, heads, steps, others, part)
