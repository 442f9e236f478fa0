"""Random EAGLE-3 heads in the published formats, and their arithmetic in plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.model_worker.tiny_models import VOCAB

HIDDEN = 32
TARGET_HIDDEN = 48
HEADS = 4
KV_HEADS = 2
DIM = 8
DRAFT_VOCAB = 100
EPSILON = 1e-5
THETA = 10000.0

LAYER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "vocab_size": VOCAB,
    "model_type": "llama",
}
PLAIN: dict[str, Any] = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": DRAFT_VOCAB,
    "target_hidden_size": TARGET_HIDDEN,
    "transformer_layer_config": {**LAYER, "architectures": ["LlamaForCausalLM"]},
}


def random_weights(
    seed: int,
    layers: int = 3,
    hidden: int = HIDDEN,
    target: int = TARGET_HIDDEN,
    vocab: int = VOCAB,
    **shapes: tuple[int, ...],
) -> dict[str, Tensor]:
    """Weights by the names that speculators give them. Further `shapes` have names with two underlines for a dot."""
    random = torch.Generator().manual_seed(seed)
    inner = LAYER["intermediate_size"]
    attention = "layers.0.self_attn."
    wanted: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, layers * target),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        f"{attention}q_proj.weight": (HEADS * DIM, 2 * hidden),
        f"{attention}k_proj.weight": (KV_HEADS * DIM, 2 * hidden),
        f"{attention}v_proj.weight": (KV_HEADS * DIM, 2 * hidden),
        f"{attention}o_proj.weight": (hidden, HEADS * DIM),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (DRAFT_VOCAB, hidden),
    }
    wanted |= {name.replace("__", "."): shape for name, shape in shapes.items()}
    weights = {}
    for name, shape in wanted.items():
        drawn = torch.randn(shape, generator=random)
        weights[name] = drawn / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.2 * drawn
    # Sure of some guesses, so that others follow them.
    weights["lm_head.weight"] *= 6
    chosen = torch.randperm(vocab, generator=random)[:DRAFT_VOCAB].sort().values
    weights["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.isin(torch.arange(vocab), chosen)
    return weights


def write_head(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> str:
    """Write a head as its config has it: SafeAILab's names, unless the config is one of speculators."""
    folder.mkdir(parents=True, exist_ok=True)
    if "speculators_model_type" not in config:
        weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@dataclass(frozen=True)
class PlainHead:
    """The head's arithmetic over a whole text, in float64."""

    weights: dict[str, Tensor]
    norm_before_residual: bool = False
    norm_output: bool = False

    def logits(self, features: Tensor, text: list[int], guesses: list[int]) -> Tensor:
        """The logits [guesses, VOCAB] of what follows the text, and each guess but the last one, if that follows.

        `features` are those of all tokens of the text but the last one.
        """
        states = list(self._fused(features.double()))
        tokens = text[1:] + guesses[:-1]
        found = []
        for _ in guesses:
            out = self._layer(tokens[: len(states)], torch.stack(states))
            normed = self._norm(out[-1], "norm")
            logits = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
            logits[torch.arange(DRAFT_VOCAB) + self.weights["d2t"]] = self._times(normed, "lm_head")
            found.append(logits)
            states.append(normed if self.norm_output else out[-1])
        return torch.stack(found)

    def _fused(self, features: Tensor) -> Tensor:
        if "fc_norm.0.weight" in self.weights:
            parts = features.split(TARGET_HIDDEN, -1)
            features = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        if "input_norm.weight" in self.weights:
            features = self._norm(features, "input_norm")
        return self._times(features, "fc")

    def _layer(self, tokens: list[int], states: Tensor) -> Tensor:
        embeddings = self._norm(self.weights["embed_tokens.weight"][tokens].double(), "layers.0.input_layernorm")
        normed = self._norm(states, "layers.0.hidden_norm")
        both = torch.cat([embeddings, normed], -1)
        q, k, v = (self._heads(self._times(both, f"layers.0.self_attn.{name}_proj")) for name in "qkv")
        q, k = _rotated(q), _rotated(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
        x = (normed if self.norm_before_residual else states) + self._times(attended, "layers.0.self_attn.o_proj")
        inside = self._norm(x, "layers.0.post_attention_layernorm")
        gate = torch.nn.functional.silu(self._times(inside, "layers.0.mlp.gate_proj"))
        return x + self._times(gate * self._times(inside, "layers.0.mlp.up_proj"), "layers.0.mlp.down_proj")

    def _times(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.weights[f"{name}.weight"].double().T
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias.double()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * self.weights[f"{name}.weight"].double()

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, DIM))
        return heads


def _rotated(x: Tensor) -> Tensor:
    """Rotate [T, heads, DIM] by the tokens' positions."""
    angles = torch.arange(len(x)).double()[:, None, None] * THETA ** (-torch.arange(0, DIM, 2).double() / DIM)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    first, second = x.chunk(2, -1)
    rotated: Tensor = x * cos + torch.cat([-second, first], -1) * sin
    return rotated
