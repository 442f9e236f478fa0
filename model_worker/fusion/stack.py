"""Runs a model of the form that form.py recognises in one compiled call per forward pass.

Knows how a batch and the KV cache become the arguments of that call. Weights are not copied: the stack reads those
that the packed modules hold. loader.py uses a stack only after it has given the logits of the model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from model_worker.attention import cpu
from model_worker.attention.params import AttentionParams
from model_worker.batch import ForwardBatch
from model_worker.fusion.form import OtherForm, Parts
from model_worker.fusion.kernel import Attention, Buffers, Cache, run_stack
from model_worker.fusion.team import team
from model_worker.kv_cache import KVCache

if TYPE_CHECKING:
    from model_worker.loader import LoadedModel

_NO_WINDOW = 1 << 40
_NOTHING = np.empty(0, np.float32)


def fused_stack(loaded: LoadedModel) -> FusedStack | None:
    """The stack of a model of the right form whose linear modules are packed, or None."""
    try:
        return FusedStack(loaded)
    except OtherForm:
        return None


class FusedStack:
    """Weights of a model as one compiled call takes them, and buffers that grow with the largest batch."""

    def __init__(self, loaded: LoadedModel) -> None:
        parts = Parts(loaded)
        self._embedding, self._rotary, self._modules = parts.embedding, parts.rotary, parts.linears
        self._vocab_size, self._head_dim = loaded.vocab_size, parts.head_dim
        self._cores = torch.get_num_threads()
        self._params: Sequence[AttentionParams] = [loaded.attention.params[layer] for layer in parts.order]
        self._order, self._layout = parts.order, loaded.attention.layout
        self._weights = parts.weights()
        self._element = np.uint16 if loaded.dtype == torch.bfloat16 else np.float32
        self._widths = parts.operand_widths()
        self._room = self._make_room(1)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Write the batch's tokens into the cache and return float32 logits [L, vocab] at `batch.logit_positions`."""
        x = self._embedding(batch.tokens).to(torch.float32).contiguous()
        cos, sin = self._rotary(x.unsqueeze(0), batch.positions.unsqueeze(0))
        logits = torch.empty(len(batch.logit_positions), self._vocab_size)
        team(self._cores).run(
            run_stack,
            x.numpy(),
            cos[0].contiguous().numpy(),
            sin[0].contiguous().numpy(),
            self._weights,
            self._cache(batch, cache),
            self._attention(batch),
            self._buffers(batch.num_tokens),
            batch.logit_positions.numpy(),
            logits.numpy(),
        )
        return logits

    def _cache(self, batch: ForwardBatch, cache: KVCache) -> Cache:
        k, v = ([cpu._memory(blocks[layer]) for layer in self._order] for blocks in (cache.k, cache.v))
        addresses = [np.array([array.ctypes.data for array in arrays]) for arrays in (k, v)]
        return Cache(addresses[0], addresses[1], k[0], v[0], batch.slot_block.numpy(), batch.slot_offset.numpy())

    def _attention(self, batch: ForwardBatch) -> Attention:
        kv_heads, dim = self._layout.layers[0].kv_heads, self._head_dim
        group = self._room.q.shape[1] // kv_heads
        plan = cpu._plan(batch, kv_heads, group, 4 * dim, None)
        return Attention(
            batch.block_tables.numpy(),
            plan.tiles,
            plan.units,
            plan.bounds,
            np.array([params.scale for params in self._params], np.float32),
            np.array([params.sliding_window or _NO_WINDOW for params in self._params], np.int64),
            _NOTHING,
        )

    def _buffers(self, tokens: int) -> Buffers:
        if tokens > len(self._room.q):
            self._room = self._make_room(max(tokens, 2 * len(self._room.q)))
        return Buffers(*(array[:tokens] for array in self._room))

    def _make_room(self, tokens: int) -> Buffers:
        layer, hidden, heads, inner = self._layout.layers[0], *self._widths
        q_heads = (self._weights.biases.shape[1] - layer.kv_heads * (layer.k_dim + layer.v_dim)) // layer.k_dim
        return Buffers(
            hidden=np.zeros((tokens, hidden), self._element),
            qkv=np.zeros((tokens, self._weights.biases.shape[1]), np.float32),
            q=np.zeros((tokens, q_heads, layer.k_dim), np.float32),
            mixed=np.zeros((tokens, q_heads, layer.v_dim), np.float32),
            heads=np.zeros((tokens, heads), self._element),
            inner=np.zeros((tokens, inner), self._element),
        )
