"""Paged attention on CUDA: torch's variable-length attention reads the blocks through the block table.

Knows the limits of that kernel (FlashAttention 2, as torch brings it), and how a batch is put to it; `unsupported`
gives the reason why the reference backend must attend instead. Does not know models. Imports the kernel only when it is
called: that import takes a second, which workers without a GPU need not spend.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from model_worker.attention import reference
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import AttentionParams, KVLayout

# Tokens of a block: the kernel takes multiples of this only.
BLOCK_SIZE = 256
LEAST_CAPABILITY = (8, 0)
LARGEST_HEAD = 256
HEAD_STEP = 8
DTYPES = (torch.float16, torch.bfloat16)
# What `attend` passes and torch's function has not always had.
_NEEDED = {"block_table", "enable_gqa", "num_splits", "scale", "seqused_k", "window_size"}


def unsupported(layout: KVLayout, params: Sequence[AttentionParams], device: torch.device) -> str | None:
    """Explain why the kernel cannot attend for these layers on this device; None if it can."""
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no FlashAttention for NVIDIA GPUs"
    if (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        return f"the GPU's compute capability is {'.'.join(map(str, capability))}, and it takes 8.0"
    if (reason := unsupported_version()) is not None:
        return reason
    return unsupported_layers(layout, params)


def unsupported_version() -> str | None:
    """Explain why this version of torch cannot read blocks; None if it can."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no attention for sequences of any length"
    lacking = _NEEDED - set(inspect.signature(varlen_attn).parameters)
    return f"torch {torch.__version__}'s varlen_attn has no {', '.join(sorted(lacking))}" if lacking else None


def unsupported_layers(layout: KVLayout, params: Sequence[AttentionParams]) -> str | None:
    """Explain why the kernel cannot attend for these layers on any device; None if it can."""
    if layout.dtype not in DTYPES:
        return f"the model computes in {str(layout.dtype).removeprefix('torch.')}, not in bfloat16 or float16"
    for layer in layout.layers:
        if layer.k_dim != layer.v_dim:
            return f"its keys have {layer.k_dim} elements and its values {layer.v_dim}"
        if layer.k_dim > LARGEST_HEAD or layer.k_dim % HEAD_STEP:
            return f"its heads have {layer.k_dim} elements, not a multiple of {HEAD_STEP} up to {LARGEST_HEAD}"
    if any(layer.sinks is not None for layer in params):
        return "its attention has sinks"
    if any(layer.softcap is not None for layer in params):
        return "its attention has a soft cap"
    return None


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Attend with T queries over blocks of a multiple of 256 tokens. Waits for nothing, so it can be captured, but for
    prompts whose tokens see later ones."""
    if batch.seen is not None and params.looks_ahead:
        # The kernel knows no later keys.
        return reference.attend(q, k_cache, v_cache, batch, params)
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q,
        k_cache,
        v_cache,
        batch.query_start,
        # Not read where there is a block table, but the kernel wants it; FlashAttention 3 and 4 would want None.
        batch.kv_start,
        batch.max_query,
        batch.max_kv,
        scale=params.scale,
        window_size=window(batch.max_query, params.sliding_window),
        enable_gqa=True,
        seqused_k=batch.kv_len,
        block_table=batch.block_tables,
        # More splits of a paged cache give wrong results in torch 2.13 (pytorch issue 194167), and with one a row's
        # result does not depend on its neighbours.
        num_splits=1,
    )
    assert isinstance(out, Tensor)
    return out


def window(max_query: int, sliding_window: int | None) -> tuple[int, int]:
    """Count the keys that a query sees before and after its own position, -1 for all; queries are a sequence's last
    tokens."""
    if sliding_window is not None:
        return sliding_window - 1, 0
    # A single query is the last token and sees all keys. With no mask, the kernel takes the query heads
    # that share a KV head together and reads their keys once.
    return (-1, 0) if max_query > 1 else (-1, -1)
