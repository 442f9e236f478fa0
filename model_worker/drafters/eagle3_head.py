"""An EAGLE-3 head: one decoder layer that guesses tokens from residuals of the model that is served.

(Y. Li et al., 2025.) The features of a token are the residuals of some of the served model's layers, side by side. The
layer reads the next token's embedding beside a vector that `fc` makes of them; about its own guesses it has no
features, and reads its own last state instead. Its vocabulary may be a part of the served model's. Knows tensors and
its own K and V. Does not know rows, nor where weights come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from model_worker.attention import AttentionBackend, reference
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import AttentionParams, KVCache, KVLayout, LayerShape


@dataclass(frozen=True)
class HeadForm:
    """What a head is made of, beside the numbers of its layer's config."""

    # The layers of the served model whose residuals it reads, as they enter, and the width of these.
    layers: tuple[int, ...]
    target_hidden: int
    # Tokens that it can guess, and those of the served model.
    draft_vocab: int
    vocab: int
    # Whether it has a table of embeddings, and lm_head, of its own, or takes the served model's.
    own_embedding: bool
    own_lm_head: bool
    # Whether fc's inputs are normalised: each residual by itself, or all together.
    norms_features: bool = False
    norms_joined: bool = False
    # Whether the layer's residual begins behind its first norm; whether its states go on behind the last one.
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False


class _Attention(nn.Module):
    """Projections that read an embedding and a state side by side."""

    def __init__(self, config: LlamaConfig, form: HeadForm) -> None:
        super().__init__()
        dim = head_dim(config)
        heads = int(config.num_attention_heads)
        kv_heads = int(config.num_key_value_heads or heads)
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, heads * dim, bias=form.qkv_bias)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=form.qkv_bias)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=form.qkv_bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=form.o_bias)


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig, form: HeadForm) -> None:
        super().__init__()
        norms = [LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        self.self_attn = _Attention(config, form)
        self.mlp = LlamaMLP(config)


class Eagle3Head(nn.Module):
    """The modules, named as the published files name their weights."""

    def __init__(self, config: LlamaConfig, form: HeadForm) -> None:
        super().__init__()
        hidden = config.hidden_size
        width = len(form.layers) * form.target_hidden
        self.form = form
        self.fc = nn.Linear(width, hidden, bias=form.fc_bias)
        self.layers = nn.ModuleList([_Layer(config, form)])
        self.norm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.fc_norm = nn.ModuleList(
            LlamaRMSNorm(form.target_hidden, eps=config.rms_norm_eps) for _ in form.layers if form.norms_features
        )
        self.input_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps) if form.norms_joined else None
        self.embed_tokens = nn.Embedding(form.vocab, hidden) if form.own_embedding else None
        self.lm_head = nn.Linear(hidden, form.draft_vocab, bias=False) if form.own_lm_head else None
        self.rotary = LlamaRotaryEmbedding(config)
        # The tokens of the served model that the head's own tokens are.
        self.targets = torch.arange(form.draft_vocab)
        # How it attends to its blocks.
        self.attend: AttentionBackend = reference.attend
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads or self._heads)
        self._dim = head_dim(config)
        sliding = (getattr(config, "layer_types", None) or [""])[0] == "sliding_attention"
        window = getattr(config, "sliding_window", None) if sliding else None
        self._params = AttentionParams(self._dim**-0.5, sliding_window=window)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def layout(self) -> KVLayout:
        """The shape of its K and V."""
        return KVLayout((LayerShape(self._kv_heads, self._dim, self._dim),), self.dtype)

    def states_of(self, features: Tensor) -> Tensor:
        """Make the vectors [T, hidden] that the layer reads of features [T, layers x width]."""
        if len(self.fc_norm):
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        made: Tensor = self.fc(features)
        return made

    def embeddings_of(self, tokens: Tensor, table: nn.Module) -> Tensor:
        """Return the embeddings of tokens; `table` is the served model's."""
        own = table if self.embed_tokens is None else self.embed_tokens
        found: Tensor = own(tokens)
        return found.to(self.dtype)

    def forward(
        self, embeddings: Tensor, states: Tensor, positions: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> Tensor:
        """Return what leaves the layer [T, hidden]. `positions` i64[T] are those of the states' tokens."""
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(states)
        residual = normed if self.form.norm_before_residual else states
        both = torch.cat([layer.input_layernorm(embeddings), normed], -1)
        residual = residual + self._attention(layer.self_attn, both, positions, batch, cache)
        out: Tensor = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return out

    def guesses_of(self, out: Tensor, lm_head: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the logits [T, vocabulary of the served model] of what leaves the layer, and the states that go on.

        `lm_head` is the served model's.
        """
        normed = self.norm(out)
        logits = (lm_head if self.lm_head is None else self.lm_head)(normed).float()
        every = logits.new_full((len(logits), self.form.vocab), -torch.inf)
        every[:, self.targets] = logits
        return every, normed if self.form.norm_output else out

    def _attention(self, modules: Any, both: Tensor, positions: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        q = modules.q_proj(both).view(1, -1, self._heads, self._dim)
        k = modules.k_proj(both).view(1, -1, self._kv_heads, self._dim)
        v = modules.v_proj(both).view(-1, self._kv_heads, self._dim)
        cos, sin = self.rotary(both, positions[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        cache.write(0, batch, k[0], v)
        attended = self.attend(q[0], cache.k[0], cache.v[0], batch, self._params)
        projected: Tensor = modules.o_proj(attended.flatten(1))
        return projected


def head_dim(config: LlamaConfig) -> int:
    """Return the width of the heads of attention."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def default_layers(count: int) -> tuple[int, ...]:
    """Return the layers that heads read of a model of so many layers, unless their config names others."""
    return 2, count // 2, count - 3


def check_layers(layers: Sequence[int], count: int) -> str:
    """Say what is wrong with the layers that a head reads of a model of so many layers; empty if nothing is."""
    wrong = [layer for layer in layers if not 0 <= layer <= count]
    if not layers or wrong or len(set(layers)) < len(layers):
        return f"it reads the layers {list(layers)}, and the served model has {count}"
    return ""
