"""A model that can be served, and the facts about it that the rest of the worker needs.

Knows no file, no device's kernels and no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from model_worker.adapters.fitting import Adapter
from model_worker.batch import DeferredTokens, ForwardBatch
from model_worker.keeper.kept_weights import KeptWeights
from model_worker.kv_cache import AttentionParams, KVCache, KVLayout
from model_worker.recurrent.mixers import RecurrentLayers
from model_worker.vision.encoder import Encoder

# Tokens of a KV block where the attention backend does not mind.
BLOCK_SIZE = 16

Progress = Callable[[str, int, int], None]  # what is being done, how much is done, out of how much
# Takes a batch that was computed, and the residual of its tokens, f32[T, layers, hidden], as it entered some layers.
TakeResiduals = Callable[[ForwardBatch, NDArray[Any]], None]


class ModelRefused(ValueError):
    """This model cannot be served. The message names the architecture and the reason."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(f"{architecture} cannot be served: {reason}")
        self.architecture = architecture
        self.reason = reason


@dataclass(frozen=True, eq=False)
class AttentionLayers:
    """The attention layers of a model, in the order in which it runs them."""

    layer_of: dict[nn.Module, int]
    params: tuple[AttentionParams, ...]
    layout: KVLayout


class CompiledStack(Protocol):
    """A whole decoder in one compiled call per forward pass. Token ids are i64, logits float32 [n, vocab]."""

    def fits(self, block_size: int) -> bool:
        """Whether it can read KV blocks of this many tokens."""

    def add_adapter(self, handle: int, adapter: Adapter) -> int:
        """Keep an adapter for batches that name it. Returns its bytes."""

    def drop_adapter(self, handle: int) -> None:
        """Forget an adapter."""

    def close(self) -> None:
        """Let go of all weights. No pass follows."""

    def watch(self, layers: Sequence[int], take: TakeResiduals) -> None:
        """Give `take` the residual as it enters these layers, after each pass whose sequences have rows."""

    def logits(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return the logits of the tokens that the batch wants."""

    def hidden(self, batch: ForwardBatch, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return the logits, and the hidden states that they were made of, [L, hidden]."""

    def greedy(self, batch: ForwardBatch, cache: KVCache, wanted: NDArray[Any]) -> tuple[NDArray[Any], Tensor]:
        """Return the token of the largest logit of each row, and the logits of the rows `wanted`."""

    @property
    def overlaps(self) -> bool:
        """Whether a pass takes so long that other work is worth doing meanwhile."""

    def launch(self, batch: ForwardBatch, cache: KVCache, deferred: DeferredTokens) -> Callable[[], NDArray[Any]]:
        """Launch a pass. Returns what waits for its tokens."""


class Layers(Protocol):
    """A decoder's layers in few launches on a GPU, between the model's own embedding and head."""

    def logits(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        attend: Callable[..., Tensor],
        params: Sequence[AttentionParams],
        change: Callable[[Sequence[Any], Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Return the logits of the tokens that the batch wants, which see no later tokens.

        `change` changes in place what linear modules, whose outputs lie side by side, have made of their input.
        """


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that has passed its self-check, and the facts about it that others need."""

    model: PreTrainedModel
    attention: AttentionLayers
    device: torch.device
    dtype: torch.dtype
    architecture: str
    vocab_size: int  # the width of the logits, which may exceed the tokenizer's vocabulary
    max_position: int | None  # positions the model was made for; None if it sets no limit
    eos_token_ids: tuple[int, ...]
    parameter_count: int
    parameter_bytes: int  # as they are kept: a quantized weight takes less, a packed tied embedding a second copy
    recurrent: RecurrentLayers | None = None  # those that keep a state of each row beside the KV cache
    stack: CompiledStack | None = None  # the same model in one compiled call, for CPUs
    layers: Layers | None = None  # the same layers in few launches, for GPUs
    kernel_family: str = "decoder"  # of the kernels that a CPU runs it with, as kernel_cache has them
    has_kernels: bool = True  # False while they are being compiled: a call would compile them here
    awaits_kernels: bool = False  # whether further kernels of its family are being compiled, without which it runs
    attention_name: str = "auto"  # the attention backend that serves this model, as ModelRunner takes it
    block_size: int = BLOCK_SIZE  # tokens of a KV block, as the backend likes them
    encoder: Encoder | None = None  # of images; None for a model that takes none
    clip_tokens: int = 0  # tokens at the start of each sequence that stand for a clip of speech; 0: there is none
    row_invariant: bool = False  # whether in the stack a token's bits depend on nothing else in its pass
    kept: KeptWeights | None = None  # what a keeper has of the weights, on a GPU

    @property
    def embedding(self) -> nn.Module:
        """The module that makes vectors of tokens."""
        module: nn.Module = self.model.get_input_embeddings()
        return module

    @property
    def hidden_size(self) -> int:
        """Width of the vectors that stand for tokens."""
        embedding: Any = self.embedding
        # A table in codes has no weight but one that is made anew.
        return int(embedding.embedding_dim if hasattr(embedding, "embedding_dim") else embedding.weight.shape[1])


def check_positions(max_model_len: int | None, max_position: int | None) -> None:
    if max_model_len is not None and max_position is not None and max_model_len > max_position:
        raise ValueError(f"max_model_len must be at most the model's {max_position} positions, got {max_model_len}")


def first_line(error: Exception) -> str:
    """Return the first line of an error of transformers: it says what is wrong, and paragraphs may follow."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def max_position_of(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that a model was made for; None if its config sets no limit.

    YaRN makes the original context `factor` times as long, and model cards let max_position_embeddings be the original.
    (Of other types of rope max_position_embeddings is the extended context already.)
    """
    text = config.get_text_config(decoder=True)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None)
    if limit is None or not isinstance(rope, dict):
        return limit
    each = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for parameters in each:
        factor = parameters.get("factor")
        original = parameters.get("original_max_position_embeddings", limit)
        if parameters.get("rope_type") == "yarn" and factor and original:
            limit = max(limit, int(factor * original))
    return limit
