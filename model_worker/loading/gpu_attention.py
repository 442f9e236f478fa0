"""Chooses the attention that serves a model on a GPU: the first kernel that proves itself, else plain torch.

A kernel is tried on its own (decode rows, prompts, lengths around the edges of blocks and pieces, a window that cuts,
and a recorded launch), and then within the model, against the logits of transformers' own forward pass. A kernel that
fails in any way, of which there are many between builds of torch, drivers and cards, is logged and left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from model_worker.agreement import Agreed
from model_worker.attention import attention_backend, cuda, reference, triton
from model_worker.batch import ForwardBatch
from model_worker.cuda.graphs import CudaRecorder
from model_worker.kv_cache import AttentionParams, KVCache, KVLayout, LayerShape
from model_worker.loading import verify
from model_worker.model import LoadedModel, ModelRefused, first_line

log = logging.getLogger(__name__)

# Largest relative error of an attention output vector. Kernels round weights to the model's dtype, once.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# The longest window that is tried: a longer one cuts nothing off from these sequences.
_LONGEST_WINDOW = 300


def _longest() -> int:
    """Return the tokens of the longest sequence: two pieces of a decode row, the last one with few keys."""
    return triton.PIECE + 3


@dataclass(frozen=True)
class Candidate:
    """An attention kernel: its name, tokens of a block, and why it cannot serve the model, if it cannot."""

    name: str
    block_size: int
    reason: str | None


def candidates(loaded: LoadedModel) -> list[Candidate]:
    """Return the kernels in the order in which they are tried."""
    layers = loaded.attention
    return [
        Candidate("triton", triton.BLOCK_SIZE, triton.unsupported(layers.layout, loaded.device)),
        Candidate("cuda", cuda.BLOCK_SIZE, cuda.unsupported(layers.layout, layers.params, loaded.device)),
    ]


def choose_attention(
    loaded: LoadedModel,
    tokens: Tensor,
    expected: Tensor,
    kernels: Sequence[Candidate] | None = None,
    agreed: Agreed | None = None,
) -> LoadedModel:
    """Use the first kernel that can attend for this model and proves it; else plain torch, and log the reasons.

    In a group `agreed` says whether something is so on all ranks. They take the same kernel, since they compute passes
    together. ModelRefused where such a pass fails on this rank: the others cannot know.
    """
    reasons = []
    for kernel in candidates(loaded) if kernels is None else kernels:
        reason = kernel.reason or _failure_alone(loaded, kernel)
        if agreed is not None and not agreed(reason is None):
            reason = reason or "it fails on another rank"
        if reason is None:
            try:
                verify.check_paged(loaded, tokens, expected, kernel.name, kernel.block_size)
                return replace(loaded, attention_name=kernel.name, block_size=kernel.block_size)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # compilers and drivers have errors of their own
                reason = first_line(error)
                # What is refused has the same logits on all ranks.
                if agreed is not None and not isinstance(error, ModelRefused):
                    text = f"a pass with the {kernel.name} attention fails on one rank: {reason}"
                    raise ModelRefused(loaded.architecture, text) from error
        if kernel.reason is None:
            log.warning("%s is not served by the %s attention: %s", loaded.architecture, kernel.name, reason)
        reasons.append(f"{kernel.name}: {reason}")
    log.warning("%s attends in plain torch, which is slow: %s", loaded.architecture, "; ".join(reasons))
    return replace(loaded, attention_name="reference")


def _failure_alone(loaded: LoadedModel, kernel: Candidate) -> str | None:
    """Say why a kernel does not prove itself on its own; None if it does."""
    try:
        with torch.inference_mode():
            check_attention(loaded, kernel)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and drivers have errors of their own
        return first_line(error)
    return None


def check_attention(loaded: LoadedModel, kernel: Candidate) -> None:
    """Compare a kernel with plain torch on random batches. ModelRefused says where they differ."""
    attend = attention_backend(kernel.name, loaded.device)
    layout = loaded.attention.layout
    for shape, query_heads, params in _distinct(loaded):
        cache = _random_cache(KVLayout((shape,), layout.dtype), kernel.block_size, loaded.device)
        for kind, batch in batches(kernel.block_size, cache.num_blocks, loaded.device):
            q = random_values((batch.num_tokens, query_heads, shape.k_dim), loaded.device).to(layout.dtype)
            got = attend(q, cache.k[0], cache.v[0], batch, params)
            want = reference.attend(q, cache.k[0], cache.v[0], batch, params)
            error = relative_error(got, want)
            if not error < TOLERANCE[layout.dtype]:
                raise ModelRefused(
                    loaded.architecture,
                    f"the kernel attends to {kind} otherwise than plain torch (relative error {error:.2g})",
                )
            if loaded.device.type == "cuda" and batch.max_query == 1:
                values = cache.k[0], cache.v[0], batch, params
                again = CudaRecorder()(lambda q=q, values=values: attend(q, *values))()  # type: ignore[misc]
                if not torch.equal(again, got):
                    raise ModelRefused(loaded.architecture, "a recorded launch of the kernel gives other values")


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the largest error of any output vector, relative to its size, or to the typical size if it is smaller."""
    size = want.float().norm(dim=-1)
    return float(((got.float() - want.float()).norm(dim=-1) / size.clamp_min(float(size.mean()))).max())


def _distinct(loaded: LoadedModel) -> Iterator[tuple[LayerShape, int, AttentionParams]]:
    """Yield each kind of attention layer once: its shape, its query heads, and parameters of which the window cuts."""
    layers = loaded.attention
    seen = set()
    for layer, index in layers.layer_of.items():
        shape = layers.layout.layers[index]
        params = layers.params[index]
        group = int(getattr(layer, "num_key_value_groups", 1))
        window = params.sliding_window and min(params.sliding_window, _LONGEST_WINDOW)
        kind = (shape, group, window, params.softcap, params.sinks is None)
        if kind not in seen:
            seen.add(kind)
            query_heads = shape.kv_heads * group if params.sinks is None else len(params.sinks)
            yield shape, query_heads, replace(params, sliding_window=window)


def _random_cache(layout: KVLayout, block_size: int, device: torch.device) -> KVCache:
    cache = KVCache(layout, 8 * -(-_longest() // block_size), block_size, device)
    for blocks in (cache.k[0], cache.v[0]):
        blocks.copy_(random_values(blocks.shape, device))
    return cache


def random_values(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the same normal values each time."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0)).to(device)


def batches(block_size: int, num_blocks: int, device: torch.device) -> Iterator[tuple[str, ForwardBatch]]:
    """Yield decode rows, prompts, and both together. Each sequence is its query tokens, and those before them."""
    edges = (1, block_size - 1, block_size, block_size + 1, _longest())
    decode = [(1, length - 1) for length in edges]
    prompts = [(block_size + 3, 0), (5, _longest() - 5)]
    for kind, sequences in (("decode rows", decode), ("prompts", prompts), ("mixed rows", decode[-2:] + prompts)):
        queries = np.array([query for query, _ in sequences])
        lengths = queries + [past for _, past in sequences]
        width = -(-int(lengths.max()) // block_size)
        tables = np.random.default_rng(0).permutation(num_blocks)[: len(sequences) * width]
        tokens = np.zeros(int(queries.sum()), np.int64)
        table = tables.reshape(len(sequences), width)
        yield kind, ForwardBatch.build(tokens, queries, lengths, table, block_size, tokens[:0], device)
