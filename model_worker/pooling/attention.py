"""Attention within each of several texts that lie one after another in one forward pass.

One function in transformers' attention registry, for encoders (all tokens of a text see each other) and decoders
(tokens see those before), with or without a window. Knows no architecture; whether the function does what a model means
is proven at load (verify.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_worker.attention import cuda
from model_worker.pooling.texts import Texts

PACKED_ATTENTION = "tokenyard_packed"

# Keyword arguments that change what attention means, and are not computed here.
_NOT_COMPUTED = ("position_bias", "s_aux")


class NotPacked(RuntimeError):
    """This model's attention needs what the packed form does not compute."""


# Queries of a text whose capped logits exist at once: 256 of 16 heads and 8,192 keys take 134 MB.
_QUERIES_AT_ONCE = 256

# A context variable and not a keyword argument: not every architecture hands unknown keywords down to its attention.
_current: ContextVar[Texts] = ContextVar("packed_texts")


@contextmanager
def packed(texts: Texts) -> Iterator[None]:
    """Attend within each of `texts` in this context."""
    token = _current.set(texts)
    try:
        yield
    finally:
        _current.reset(token)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention function. Tensors are [1, heads, T, head_dim]; the result is [1, T, heads,
    head_dim]. `sliding_window`: tokens that are less than so many apart see each other."""
    lacking = [name for name in _NOT_COMPUTED if others.get(name) is not None]
    if attention_mask is not None or lacking:
        raise NotPacked(f"its attention takes {', '.join(lacking) or 'a mask of its own'}")
    texts = _current.get()
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if query.shape[0] != 1 or query.shape[2] != len(texts.tokens):
        raise NotPacked("its attention does not see the tokens of all texts in one row")
    if softcap is None and texts.seen is None and _varlen_fits(query, value):
        return _varlen(query, key, value, texts, causal, sliding_window, scaling), None
    shared = key.shape[1] != query.shape[1]
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    first = 0
    for start, count, length in texts.runs:
        inside = slice(start, start + count * length)
        q, k, v = (tensor[0, :, inside].unflatten(1, (count, length)).transpose(0, 1) for tensor in (query, key, value))
        seen = None if texts.seen is None else texts.visible[first : first + count, None, None, :length]
        first += count
        if softcap is not None:
            found = _capped(q, k, v, causal, sliding_window, scaling, softcap, seen)
        elif seen is None and (sliding_window is None or sliding_window >= length):
            found = scaled_dot_product_attention(
                q, k, v, is_causal=causal and length > 1, scale=scaling, enable_gqa=shared
            )
        else:
            places = torch.arange(length, dtype=torch.int32, device=query.device)
            visible = _visible(places, places, causal, sliding_window)
            if seen is not None:
                visible = visible & seen
            found = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling, enable_gqa=shared)
        out[0, inside] = found.transpose(1, 2).flatten(0, 1)
    return out, None


def _visible(queries: Tensor, keys: Tensor, causal: bool, window: int | None) -> Tensor:
    """Return which keys each query sees, by their places in the text: bool[queries, keys]."""
    distance = queries[:, None] - keys
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if window is None else visible & (distance.abs() < window)


def _capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    scaling: float | None,
    softcap: float,
    seen: Tensor | None,
) -> Tensor:
    """Attend with logits that are squeezed between -softcap and softcap. `seen` [texts, 1, 1, keys]; None for all."""
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.float().repeat_interleave(group, dim=1) for tensor in (k, v))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    keys = torch.arange(q.shape[2], dtype=torch.int32, device=q.device)
    parts = []
    for some, places in zip(q.split(_QUERIES_AT_ONCE, dim=2), keys.split(_QUERIES_AT_ONCE), strict=True):
        logits = softcap * torch.tanh(some.float() @ k.transpose(-1, -2) * scale / softcap)
        visible = _visible(places, keys, causal, window)
        hidden = ~(visible if seen is None else visible & seen)
        weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1)
        # A token that sees nothing has weights that are no numbers.
        parts.append((weights.masked_fill(hidden, 0) @ v).to(q.dtype))
    return torch.cat(parts, dim=2)


def _varlen_fits(query: Tensor, value: Tensor) -> bool:
    """Whether the GPU's kernel for texts of any length computes these heads."""
    width = query.shape[3]
    return (
        query.device.type == "cuda"
        and query.dtype in cuda.DTYPES
        and width == value.shape[3]
        and width % cuda.HEAD_STEP == 0
        and width <= cuda.LARGEST_HEAD
        and torch.cuda.get_device_capability(query.device) >= cuda.LEAST_CAPABILITY
    )


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, texts: Texts, causal: bool, window: int | None, scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if window is None else window - 1
    longest = max(texts.lengths)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        texts.bounds,
        texts.bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(before, 0 if causal else before),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


# Only here, and not in transformers' registry of masks: a name unknown to that one gets no mask built at all.
ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, _packed_attention)
