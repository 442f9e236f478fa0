"""The paged KV cache: for each attention layer, K and V of a fixed number of blocks.

Elements have the model's own type, or are codes of 8 bits with a float32 scale for each token and head. Knows shapes
and bytes. Does not know which block belongs to which sequence (the scheduler does), nor how attention reads the blocks
(attention/ does).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.host_memory import give_back
from model_worker.recurrent.states import RecurrentStates
from shared.resources import free_memory

GIB = 1 << 30
# On a CPU the KV cache shares memory with everything else on the machine, so the default leaves most of it alone.
CPU_SHARE = 0.25
CPU_LIMIT = 4 * GIB
# A CUDA device is ours, but activations and the allocator's slack need room beside the cache.
CUDA_SHARE = 0.85
# The types of codes that K and V may be kept in, by the names of `--kv-dtype`.
CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Bytes of the scale of one token's codes of one head.
SCALE_BYTES = 4


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """The arithmetic of one attention layer.

    A query at position p sees keys p - sliding_window + 1 to p, and with `looks_ahead` also those of
    `ForwardBatch.seen`. Its logits are softcap * tanh(logit / softcap).
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [query heads]: one more logit per head that takes weight and gives no value
    looks_ahead: bool = True


@dataclass(frozen=True)
class LayerShape:
    """The KV shape of one attention layer per token. K and V heads may differ in size."""

    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True)
class KVLayout:
    """The shapes of all attention layers, in the order in which the model runs them."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype

    @property
    def in_codes(self) -> bool:
        """Whether K and V are codes with scales."""
        return self.dtype in CODE_DTYPES.values()

    def as_codes(self, name: str) -> KVLayout:
        """Return the same layers in codes of this name. ValueError for heads that cannot be kept so."""
        if any(layer.k_dim % 2 for layer in self.layers):
            raise ValueError(f"kv_dtype {name} wants heads with an even number of elements: use kv_dtype auto")
        return replace(self, dtype=CODE_DTYPES[name])

    @property
    def bytes_per_token(self) -> int:
        elements = sum(layer.elements_per_token for layer in self.layers) * self.dtype.itemsize
        scales = sum(2 * layer.kv_heads for layer in self.layers) * SCALE_BYTES
        return elements + scales if self.in_codes else elements

    def bytes_per_block(self, block_size: int) -> int:
        return self.bytes_per_token * block_size

    def blocks_for(self, memory_bytes: int, block_size: int) -> int:
        """Return how many blocks fit; an error if not even one does."""
        blocks = memory_bytes // self.bytes_per_block(block_size)
        if blocks < 1:
            raise ValueError(
                f"kv memory of {memory_bytes} bytes does not hold one block of {block_size} tokens, "
                f"which takes {self.bytes_per_block(block_size)} bytes: raise it or use smaller blocks"
            )
        return int(blocks)


class KVCache:
    """K and V per layer, indexed `[block, offset, kv_head, element]`, and not moved while they are there.

    On a CPU a block's memory is laid out head by head: a core reads one head's keys from end to end. In codes a block
    is bytes, as many for each token and head as elements and a scale take; attention/coded.py knows their order.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        states: RecurrentStates | None = None,
    ) -> None:
        """`states` are those of the recurrent layers, which are released and restored with the blocks."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV cache needs blocks and tokens in them: {num_blocks=}, {block_size=}")
        if layout.in_codes and (device.type != "cpu" or block_size % 2):
            raise ValueError(f"K and V in codes want a CPU and blocks of an even number of tokens: {block_size=}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states = states

        self._device = device
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.restore()

    def release(self) -> None:
        """Give the memory back, and with it all K and V. On a CPU the cache may be used again at once."""
        if self.states is not None:
            self.states.release()
            if self._device.type == "cpu":
                self.states.restore()
        if self._device.type == "cpu":
            give_back([memory_of(blocks) for blocks in (*self.k, *self.v)])
        else:
            self.k = []
            self.v = []

    def restore(self) -> None:
        """Take memory for the blocks, if there is none: zeros."""
        if self.states is not None:
            self.states.restore()
        if self.k:
            return

        def blocks(layer: LayerShape, head_dim: int) -> Tensor:
            on_cpu = self.num_blocks, layer.kv_heads, self.block_size
            if self.layout.in_codes:
                return _untouched_zeros((*on_cpu, head_dim + SCALE_BYTES), torch.uint8).transpose(1, 2)
            # Zeros, not garbage: a NaN in an unwritten slot must not reach a softmax through 0 * NaN.
            if self._device.type == "cpu":
                return _untouched_zeros((*on_cpu, head_dim), self.layout.dtype).transpose(1, 2)
            shape = (self.num_blocks, self.block_size, layer.kv_heads, head_dim)
            return torch.zeros(*shape, dtype=self.layout.dtype, device=self._device)

        self.k = [blocks(layer, layer.k_dim) for layer in self.layout.layers]
        self.v = [blocks(layer, layer.v_dim) for layer in self.layout.layers]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.bytes_per_block(self.block_size)

    def write(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        """Put K and V `[T, kv_heads, head_dim]` of the batch's tokens into their slots."""
        self.k[layer].index_put_((batch.slot_block, batch.slot_offset), k)
        self.v[layer].index_put_((batch.slot_block, batch.slot_offset), v)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make zeros whose pages the kernel provides when they are first used: a large cache costs no time at start."""
    # numpy takes zeroed pages from the kernel as they are; torch would write to every one of them.
    return torch.from_numpy(np.zeros((*shape, dtype.itemsize), np.uint8)).view(dtype).squeeze(-1)


def default_kv_memory(device: torch.device, models: int = 1) -> int:
    """Return the bytes for the KV cache when the user names none. On CUDA, call it after the weights are loaded.

    A GPU's memory must hold the weights and caches of all `models` whose workers share it.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE / models)
    return _rounded(min(int(free_memory() * CPU_SHARE), CPU_LIMIT))


def _rounded(size: int) -> int:
    """Round down to one of sixteen sizes between two powers of two.

    Free memory is never quite the same, and a server that starts again under the same limit should hold as much.
    """
    step = 1 << max(0, size.bit_length() - 5)
    return size // step * step


def memory_of(cache: Tensor) -> NDArray[Any]:
    """View the blocks as they lie in memory, [num_blocks, kv_heads, block_size, head_dim]; bfloat16 as its bits."""
    blocks = cache.transpose(1, 2)
    if not blocks.is_contiguous():
        raise ValueError("the cpu backend needs KV blocks laid out head by head, as KVCache makes them on a CPU")
    return blocks.view(torch.uint16).numpy() if cache.dtype == torch.bfloat16 else blocks.numpy()
