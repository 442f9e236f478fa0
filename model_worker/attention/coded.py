"""K and V in codes of 8 bits, and attention over them in plain torch, for where the fused stack does not run.

A token's elements of one head are int8, or 8-bit floats (e4m3), times a float32 scale, so that the largest of them has
the largest code. A block keeps one head's codes and then its tokens' scales. The order of codes is that in which the
fused stack widens them: K as `[pair of elements, token, 2]`, V as `[pair of tokens, element, 2]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model_worker.attention.reference import attend_to
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import SCALE_BYTES, AttentionParams, KVCache

# The largest magnitude of a code.
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Elements of which none is larger than this are taken for zeros: float32 could not hold the inverse of their scale.
NOTHING = 1e-30


def encode(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes [.., elements], as bytes, and the scales [..] of values.

    Values of which one is not finite have a scale that is not finite either.
    """
    values = values.float()
    largest = values.abs().amax(-1)
    most = LARGEST_CODE[dtype]
    inverse = torch.where((largest > NOTHING) & torch.isfinite(largest), most / largest, torch.zeros(()))
    shares = (values * inverse[..., None]).nan_to_num()
    codes = shares.round().to(dtype) if dtype == torch.int8 else shares.to(dtype)
    return codes.view(torch.uint8), largest / most


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of codes, float32 [.., elements]."""
    return codes.contiguous().view(dtype).float() * scales[..., None]


class CodedBlocks(NamedTuple):
    """K or V of one layer: views of the cache's memory."""

    codes: Tensor  # K [block, token, head, pair of elements, 2], V [block, pair of tokens, 2, head, element]
    scales: Tensor  # [block, token, head]
    dtype: torch.dtype


class CodedCache:
    """Views of the memory of a cache in codes, for writers and readers in plain torch."""

    def __init__(self, cache: KVCache) -> None:
        self._dtype = cache.layout.dtype
        self.k = [self._blocks(blocks, of_k=True) for blocks in cache.k]
        self.v = [self._blocks(blocks, of_k=False) for blocks in cache.v]

    def _blocks(self, blocks: Tensor, of_k: bool) -> CodedBlocks:
        count, size, heads, width = blocks.shape
        dim = width - SCALE_BYTES
        memory = blocks.transpose(1, 2).view(count, heads, size * width)
        codes = memory[..., : size * dim]
        scales = memory[..., size * dim :].view(torch.float32).transpose(1, 2)
        if of_k:
            return CodedBlocks(codes.unflatten(2, (dim // 2, size, 2)).permute(0, 3, 1, 2, 4), scales, self._dtype)
        return CodedBlocks(codes.unflatten(2, (size // 2, dim, 2)).permute(0, 2, 4, 1, 3), scales, self._dtype)

    def write(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        """Put K and V `[T, kv_heads, head_dim]` of the batch's tokens into their slots."""
        at = (batch.slot_block, batch.slot_offset)
        codes, scales = encode(k, self._dtype)
        self.k[layer].codes.index_put_(at, codes.unflatten(2, (-1, 2)))
        self.k[layer].scales.index_put_(at, scales)
        codes, scales = encode(v, self._dtype)
        self.v[layer].codes.index_put_((batch.slot_block, batch.slot_offset // 2, batch.slot_offset % 2), codes)
        self.v[layer].scales.index_put_(at, scales)


def attend(
    q: Tensor, k_cache: CodedBlocks, v_cache: CodedBlocks, batch: ForwardBatch, params: AttentionParams
) -> Tensor:
    """Attend with T queries to CodedCache's views of one layer."""

    def gather(blocks: Tensor) -> tuple[Tensor, Tensor]:
        k = decode(k_cache.codes[blocks].flatten(3), k_cache.scales[blocks], k_cache.dtype)
        v = decode(v_cache.codes[blocks].flatten(1, 2), v_cache.scales[blocks], v_cache.dtype)
        return k.flatten(0, 1), v.flatten(0, 1)

    return attend_to(q, v_cache.codes.shape[-1], batch, params, gather)
