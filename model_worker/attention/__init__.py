"""Attention over the paged KV cache, and its place in transformers' attention registry.

Knows how a model's attention layers reach us (one registered function) and the one function type that backends share.
Does not know any architecture: which layer a module is, and its window, were found by running the model (probe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_worker.attention import coded, cpu, cuda, reference, triton
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import AttentionParams, KVCache

# q [T, Hq, D], one layer's K and V blocks, the batch, the layer's parameters -> [T, Hq, Dv] in q's dtype. Blocks are
# tensors, or what the cache's views in codes are.
AttentionBackend = Callable[[Tensor, Any, Any, ForwardBatch, AttentionParams], Tensor]

PAGED_ATTENTION = "tokenyard_paged"

_BACKENDS: Mapping[str, AttentionBackend] = {
    "reference": reference.attend,
    "cpu": cpu.attend,
    "cuda": cuda.attend,
    "triton": triton.attend,
}
# Backends that write K and V by themselves, and how: layer's K and V blocks, batch, K and V of its tokens.
_WRITES: Mapping[AttentionBackend, Callable[[Any, Any, ForwardBatch, Tensor, Tensor], None]] = {
    triton.attend: triton.write,
}
# Those of GPUs: they wait for nothing, so that their launches can be recorded.
RECORDABLE = (cuda.attend, triton.attend)


def attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return the backend called `name`; "auto" is the fastest one that can do any model's attention on the device."""
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "reference"
    try:
        return _BACKENDS[name]
    except KeyError:
        raise ValueError(f"attention backend {name!r} is unknown: use one of auto, {', '.join(_BACKENDS)}") from None


@dataclass(frozen=True)
class PagedForward:
    """The facts of a forward pass that its attention layers need."""

    batch: ForwardBatch
    cache: KVCache | coded.CodedCache
    backend: AttentionBackend
    layer_of: Mapping[nn.Module, int]
    params: Sequence[AttentionParams]


# A context variable and not a keyword argument: not every architecture hands unknown keywords down to its attention.
_current: ContextVar[PagedForward] = ContextVar("paged_forward")


@contextmanager
def paged_forward(forward: PagedForward) -> Iterator[None]:
    """Bind the model's attention layers to the paged cache of `forward` within this context."""
    token = _current.set(forward)
    try:
        yield
    finally:
        _current.reset(token)


def _paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' attention function. Tensors are [1, heads, T, head_dim]; the result is [1, T, heads,
    head_dim]."""
    forward = _current.get()
    layer = forward.layer_of[module]
    cache = forward.cache
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    if (write := _WRITES.get(forward.backend)) is None:
        cache.write(layer, forward.batch, k, v)
    else:
        write(cache.k[layer], cache.v[layer], forward.batch, k, v)
    params = forward.params[layer]
    out = forward.backend(query[0].transpose(0, 1), cache.k[layer], cache.v[layer], forward.batch, params)
    return out.unsqueeze(0), None


# Only here, and not in transformers' registry of masks: a name unknown to that one gets no mask built at all.
ALL_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, _paged_attention)
