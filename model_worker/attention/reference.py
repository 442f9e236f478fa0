"""Paged attention in plain torch: gather, mask, softmax in float32. It is there to be read and to test the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.kv_cache import AttentionParams

# Numbers of blocks i64[n] -> their K and V [n * block_size, kv_heads, head_dim].
Gather = Callable[[Tensor], tuple[Tensor, Tensor]]


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Attend with T queries, one sequence after the other."""

    def gather(blocks: Tensor) -> tuple[Tensor, Tensor]:
        return k_cache[blocks].flatten(0, 1), v_cache[blocks].flatten(0, 1)

    return attend_to(q, v_cache.shape[-1], batch, params, gather)


def attend_to(q: Tensor, v_dim: int, batch: ForwardBatch, params: AttentionParams, gather: Gather) -> Tensor:
    """Attend with T queries over a cache of any layout: `gather` reads one sequence's keys and values."""
    out = q.new_empty(q.shape[0], q.shape[1], v_dim)
    starts = batch.query_start.tolist()
    kv_lens = batch.kv_len.tolist()
    for sequence, kv_len in enumerate(kv_lens):
        tokens = slice(starts[sequence], starts[sequence + 1])
        blocks = batch.block_tables[sequence, : -(-kv_len // batch.block_size)].long()
        k, v = gather(blocks)
        seen = None if batch.seen is None or not params.looks_ahead else batch.seen[:, tokens]
        out[tokens] = _attend_one(q[tokens], k[:kv_len], v[:kv_len], params, seen).to(out.dtype)
    return out


def _attend_one(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, seen: Tensor | None) -> Tensor:
    """Attend with one sequence's last queries [Q, Hq, D] to all its keys [K, Hkv, D] and values [K, Hkv, Dv]."""
    group = q.shape[1] // k.shape[1]
    k, v = (kv.float().repeat_interleave(group, dim=1) for kv in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * params.scale
    if params.softcap is not None:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    visible = _visible(q.shape[0], k.shape[0], params.sliding_window, q.device, seen)
    logits = logits.masked_fill(~visible, -torch.inf)
    if params.sinks is not None:
        sinks = params.sinks.float().view(-1, 1, 1).expand(-1, q.shape[0], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v)


def _visible(queries: int, keys: int, window: int | None, device: torch.device, seen: Tensor | None = None) -> Tensor:
    """Return which key each query sees, bool[queries, keys]. Queries are the last positions of the sequence.

    `seen` [2, queries] are the first and the last key that they see, whatever their own position and the window.
    """
    key = torch.arange(keys, device=device)
    query = key[keys - queries :, None]
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    if seen is not None:
        first, last = seen[:, :, None]
        visible = visible | ((key >= first) & (key <= last))
    return visible
