"""Paged attention on GPUs with our own Triton kernels: windows, soft caps, sinks, and K and V heads of unequal sizes.

Knows how a batch is put to the kernels (cuda/paged_attention.py), and which tiles they take. Waits for nothing, so that
it can be captured, and gives a decode row the same result whatever else is in the batch. Does not know models. Triton
comes with torch's builds for GPUs; `missing` says where it is not there.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.kv_cache import AttentionParams, KVLayout

# Tokens of a block. The kernels take any multiple of it; small ones share more of a prefix, and waste less at the end.
BLOCK_SIZE = 16
# Keys of a decode row that one program reads. A row's result depends on it, so it is the same for all batches.
PIECE = 512
# tl.dot takes no smaller sides.
_LEAST_SIDE = 16
# Query heads of one tile of a decode row: those of a larger group are cut.
_MOST_HEADS = 16
# Bytes of a tile's keys and values, of which a few are in flight in a processor's shared memory.
_TILE_BYTES = 1 << 15
_LARGEST_TILE = 64
# Rows of a prompt's tile, for heads up to a size and for larger ones.
_PROMPT_ROWS = 64
_WIDE_PROMPT_ROWS = 16
_WIDE_HEAD = 256
_LARGEST_HEAD = 1024
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def missing() -> str | None:
    """Explain why the kernels cannot be had here; None if they can."""
    return None if importlib.util.find_spec("triton") else "triton is not installed: torch's builds for GPUs bring it"


def unsupported(layout: KVLayout, device: torch.device) -> str | None:
    """Explain why the kernels cannot attend for these layers on this device; None if they can."""
    if device.type != "cuda":
        return f"the kernels run on GPUs, not on {device.type}"
    if (reason := missing()) is not None:
        return reason
    if layout.dtype not in DTYPES:
        return f"the model computes in {str(layout.dtype).removeprefix('torch.')}"
    if (widest := max(max(layer.k_dim, layer.v_dim) for layer in layout.layers)) > _LARGEST_HEAD:
        return f"its heads have {widest} elements, and the kernels take {_LARGEST_HEAD}"
    return None


@dataclass(frozen=True)
class _Shape:
    """The sizes that a layer's kernels are compiled for."""

    heads: int  # of one tile
    chunks: int  # tiles of the query heads that share a KV head
    tile: int  # keys
    prompt_rows: int
    constants: dict[str, Any]


@cache
def _shape(group: int, k_dim: int, v_dim: int, itemsize: int) -> _Shape:
    heads = min(group, _MOST_HEADS)
    main = max(_LEAST_SIDE, 1 << (k_dim.bit_length() - 1))
    rest = max(_LEAST_SIDE, _power(k_dim - main)) if k_dim > main else 0
    wide = max(_LEAST_SIDE, _power(v_dim))
    fits = _TILE_BYTES // ((main + rest + wide) * itemsize)
    tile = max(_LEAST_SIDE, min(_LARGEST_TILE, 1 << (max(1, fits).bit_length() - 1)))
    constants = {"K_DIM": k_dim, "V_DIM": v_dim, "K_MAIN": main, "K_REST": rest, "V_WIDE": wide}
    rows = _WIDE_PROMPT_ROWS if max(main + rest, wide) > _WIDE_HEAD else _PROMPT_ROWS
    return _Shape(heads, -(-group // heads), tile, max(rows, _power(heads)), constants)


def _power(size: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Attend with T queries over blocks of any multiple of 16 tokens."""
    from model_worker.cuda import paged_attention as kernels

    tokens, query_heads, k_dim = q.shape
    _, page, kv_heads, v_dim = v_cache.shape
    sequences = batch.num_sequences
    shape = _shape(query_heads // kv_heads, k_dim, v_dim, q.element_size())
    if q.stride(2) != 1:
        q = q.contiguous()
    out = q.new_empty(tokens, query_heads, v_dim)
    layout = {
        "table_stride": batch.block_tables.stride(0),
        "k_block": k_cache.stride(0),
        "k_offset": k_cache.stride(1),
        "k_head": k_cache.stride(2),
        "v_block": v_cache.stride(0),
        "v_offset": v_cache.stride(1),
        "v_head": v_cache.stride(2),
        "q_token": q.stride(0),
        "q_head": q.stride(1),
        "out_token": out.stride(0),
        "scale": params.scale,
        "softcap": params.softcap or 0.0,
        "HEADS": shape.heads,
        "GROUP": query_heads // kv_heads,
        "TILE": shape.tile,
        "PAGE": page,
        "WINDOW": params.sliding_window or 0,
        "SOFTCAP": params.softcap is not None,
        "SINKS": params.sinks is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        **shape.constants,
    }
    inputs = (q, k_cache, v_cache, batch.block_tables, batch.query_start, batch.kv_len, params.sinks)
    programs = kv_heads * shape.chunks
    pieces = -(-batch.max_kv // PIECE)
    if pieces == 1:
        part = maximum = total = out
    else:
        part = q.new_empty(sequences, query_heads, pieces, v_dim, dtype=torch.float32)
        maximum = q.new_empty(sequences, query_heads, pieces, dtype=torch.float32)
        total = torch.empty_like(maximum)
    strides = {"part_token": query_heads * pieces, "part_head": pieces}
    rows = max(_LEAST_SIDE, _power(shape.heads))
    one = {"ROWS": rows, "PIECE": PIECE, "SPLIT": pieces > 1, **strides}
    kernels.decode_kernel[(sequences, programs, pieces)](out, part, maximum, total, *inputs, **layout, **one)
    if pieces > 1:
        merged = {name: layout[name] for name in ("V_DIM", "V_WIDE", "WINDOW", "out_token")}
        gathered = (out, part, maximum, total, batch.query_start, batch.kv_len)
        kernels.merge_kernel[(sequences, query_heads)](*gathered, **strides, **merged, PIECE=PIECE)
    if batch.max_query > 1:
        tiles = tokens // (shape.prompt_rows // shape.heads) + sequences
        several = {"ROWS": shape.prompt_rows, "sequences": sequences}
        kernels.prompt_kernel[(tiles, programs)](out, *inputs, **layout, **several)
    return out


def write(k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
    """Put K and V `[T, kv_heads, head_dim]` of the batch's tokens into their slots of one layer, in one launch."""
    from model_worker.cuda import kv_write_kernel as kernels

    k, v = (each if each.stride(2) == 1 else each.contiguous() for each in (k, v))
    tokens, kv_heads, k_dim = k.shape
    v_dim = v.shape[2]
    kernels.write_kernel[(tokens, kv_heads)](
        k_cache,
        v_cache,
        k,
        v,
        batch.slots,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        PAGE=k_cache.shape[1],
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_WIDE=_power(k_dim),
        V_WIDE=_power(v_dim),
    )
