"""Recognises decoders made of norm, attention, norm and gated MLP (Llama, Qwen, Mistral, Phi 3, Gemma), by structure.

Knows the modules of such a model, and the names in their forward passes, which is how a multiplier or a rotation that
is left out in some layers would show. Does not know names of models, nor how the weights are run, nor on what device.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from model_worker.kv_cache import LayerShape
from model_worker.model import AttentionLayers

_MODEL = [{"model", "lm_head"}]
_DECODER = [{"embed_tokens", "layers", "norm", "rotary_emb"}]
_PLAIN_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_LAYER = [_PLAIN_LAYER, _PLAIN_LAYER | {"resid_attn_dropout", "resid_mlp_dropout"}]
# Norms of what attention and MLP give, beside those of what they take.
_FOUR_NORMS = _PLAIN_LAYER | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_SPLIT = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ATTENTION = [_SPLIT, _SPLIT | {"q_norm", "k_norm"}, {"qkv_proj", "o_proj"}]
_MLP = [{"gate_proj", "up_proj", "down_proj", "act_fn"}, {"gate_up_proj", "down_proj", "activation_fn"}]


def _mentioned(*modules: type[nn.Module]) -> frozenset[str]:
    """Collect all attributes and globals that the forward passes of these modules name."""
    return frozenset(name for module in modules for name in inspect.unwrap(module.forward).__code__.co_names)


class Codes(NamedTuple):
    """The names that the forward passes of a form's modules may mention, and the children that its layers may have."""

    like: str
    model: frozenset[str]
    decoder: frozenset[str]
    layer: frozenset[str]
    attention: frozenset[str]
    mlp: frozenset[str]
    norm: frozenset[str]
    layers: Collection[set[str]]


LLAMA = Codes(
    "Llama's",
    model=_mentioned(
        llama.LlamaForCausalLM, mistral.MistralForCausalLM, qwen2.Qwen2ForCausalLM, qwen3.Qwen3ForCausalLM
    ),
    decoder=_mentioned(
        llama.LlamaModel,
        mistral.MistralModel,
        qwen2.Qwen2Model,
        qwen3.Qwen3Model,
        qwen2_vl.Qwen2VLTextModel,
        qwen3_vl.Qwen3VLTextModel,
    ),
    layer=_mentioned(llama.LlamaDecoderLayer, qwen2.Qwen2DecoderLayer, phi3.Phi3DecoderLayer),
    attention=_mentioned(
        llama.LlamaAttention,
        mistral.MistralAttention,
        qwen2.Qwen2Attention,
        qwen2_vl.Qwen2VLAttention,
        qwen3.Qwen3Attention,
        qwen3_vl.Qwen3VLTextAttention,
        phi3.Phi3Attention,
    ),
    mlp=_mentioned(llama.LlamaMLP, phi3.Phi3MLP),
    norm=_mentioned(llama.LlamaRMSNorm),
    layers=_LAYER,
)
# Llama's too. Beside it: four norms a layer, weights of norms that count from one, soft caps, angles by kind of layer.
GEMMA = Codes(
    "Llama's or Gemma's",
    model=LLAMA.model | _mentioned(gemma2.Gemma2ForCausalLM, gemma3.Gemma3ForCausalLM),
    decoder=LLAMA.decoder | _mentioned(gemma.GemmaModel, gemma2.Gemma2Model, gemma3.Gemma3TextModel),
    layer=LLAMA.layer | _mentioned(gemma2.Gemma2DecoderLayer, gemma3.Gemma3DecoderLayer),
    attention=LLAMA.attention | _mentioned(gemma2.Gemma2Attention, gemma3.Gemma3Attention),
    mlp=LLAMA.mlp,
    norm=LLAMA.norm | _mentioned(gemma.GemmaRMSNorm, gemma2.Gemma2RMSNorm, gemma3.Gemma3RMSNorm),
    layers=[*_LAYER, _FOUR_NORMS],
)


class UnsupportedPattern(Exception):
    """The model does not match the pattern; the message completes "since"."""


class Part(NamedTuple):
    """Some output features of a linear module: all of them, or one of the projections that a model has joined."""

    linear: Any
    first: int
    width: int


@dataclass(frozen=True, eq=False)
class LayerForm:
    """The modules of a layer."""

    attention: nn.Module
    parts: list[Part]  # queries, keys, values, what follows attention, gate, up and down
    before: tuple[Any, Any]  # norms of what attention takes, and the MLP
    behind: tuple[Any, Any] | None  # norms of what attention gives, and the MLP
    of_heads: tuple[Any, Any] | None  # norms of queries and keys
    activation: nn.Module
    kind: str | None  # of its angles, where the rotary module wants to know it

    @property
    def norms(self) -> list[Any]:
        """All norms of the layer."""
        return [*self.before, *(self.behind or ()), *(self.of_heads or ())]


@dataclass(frozen=True, eq=False)
class DecoderForm:
    """The modules of a decoder, in the order in which they compute."""

    embedding: nn.Module
    rotary: nn.Module
    layers: list[LayerForm]
    final_norm: Any
    head: Any
    logit_cap: float | None
    order: list[int]  # of each layer: its index in the KV cache
    shape: LayerShape
    q_heads: int


def decoder_form(model: Any, attention: AttentionLayers, codes: Codes) -> DecoderForm:
    """Find the modules of a model; raises UnsupportedPattern at the first that does not fit."""
    decoder = model.get_decoder()
    require(
        is_built(model, _MODEL, codes.model) and is_built(decoder, _DECODER, codes.decoder),
        f"its decoder is not built like {codes.like}",
    )
    by_kind = _has_angles_by_kind(decoder.rotary_emb, codes)
    modules = list(decoder.layers)
    for layer in modules:
        require(is_built(layer, codes.layers, codes.layer), f"its layers are not built like {codes.like}")
        fits = is_built(layer.self_attn, _ATTENTION, codes.attention)
        require(fits, f"its attention is not built like {codes.like}")
        require(is_built(layer.mlp, _MLP, codes.mlp), f"its MLP is not built like {codes.like}")
        require(layer.self_attn in attention.layer_of, "a layer does not attend")
    alike = len(attention.params) == len(modules) and len(set(attention.layout.layers)) == 1
    require(alike, "its layers have KV heads of different shapes")
    shape = attention.layout.layers[0]
    layers = [_layer(layer, shape, by_kind) for layer in modules]
    widths = {tuple(part.width for part in layer.parts) for layer in layers}
    require(len(widths) == 1, "its layers have different widths")
    q, k, v, *_ = widths.pop()
    heads = (shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim)
    require((k, v) == heads and q % k == 0, "its projections are not those of its heads")
    return DecoderForm(
        embedding=decoder.embed_tokens,
        rotary=decoder.rotary_emb,
        layers=layers,
        final_norm=decoder.norm,
        head=model.lm_head,
        logit_cap=getattr(model.config, "final_logit_softcapping", None),
        order=[attention.layer_of[layer.self_attn] for layer in modules],
        shape=shape,
        q_heads=q // shape.k_dim,
    )


def epsilon_of(norms: Collection[nn.Module], codes: Codes) -> float:
    """Return the epsilon of RMS norms. Raises UnsupportedPattern if one is of another form, or has another epsilon."""
    epsilons = {_epsilon(norm, codes) for norm in norms}
    require(len(epsilons) == 1, "its norms have different epsilons")
    return epsilons.pop()


def require(condition: bool, reason: str) -> None:
    """Raise UnsupportedPattern with the reason unless the condition holds."""
    if not condition:
        raise UnsupportedPattern(reason)


def is_built(module: nn.Module, children: Collection[set[str]], code: Collection[str]) -> bool:
    """Whether a module's children are one of these sets, and its forward pass names nothing outside `code`."""
    return {name for name, _ in module.named_children()} in children and _mentioned(type(module)) <= set(code)


def _has_angles_by_kind(rotary: nn.Module, codes: Codes) -> bool:
    """Whether a rotary module wants to know the kind of the layer."""
    asked = list(inspect.signature(rotary.forward).parameters)
    by_kind = asked == ["x", "position_ids", "layer_type"] and codes is GEMMA
    require(by_kind or asked == ["x", "position_ids"], "its rotary embedding differs by layer")
    return by_kind


def _layer(layer: Any, shape: LayerShape, by_kind: bool) -> LayerForm:
    attention = layer.self_attn
    four = hasattr(layer, "pre_feedforward_layernorm")
    inner = layer.pre_feedforward_layernorm if four else layer.post_attention_layernorm
    return LayerForm(
        attention=attention,
        parts=_parts(layer, shape),
        before=(layer.input_layernorm, inner),
        behind=(layer.post_attention_layernorm, layer.post_feedforward_layernorm) if four else None,
        of_heads=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
        activation=getattr(layer.mlp, "act_fn", None) or layer.mlp.activation_fn,
        kind=attention.layer_type if by_kind else None,
    )


def _parts(layer: Any, shape: LayerShape) -> list[Part]:
    attention = layer.self_attn
    mlp = layer.mlp
    if hasattr(attention, "qkv_proj"):
        k = shape.kv_heads * shape.k_dim
        v = shape.kv_heads * shape.v_dim
        joined, _, width = _whole(attention.qkv_proj)
        found = _split(joined, [width - k - v, k, v])
    else:
        found = [_whole(module) for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
    found.append(_whole(attention.o_proj))
    if hasattr(mlp, "gate_up_proj"):
        joined, _, width = _whole(mlp.gate_up_proj)
        found += _split(joined, [width // 2] * 2)
    else:
        found += [_whole(mlp.gate_proj), _whole(mlp.up_proj)]
    return [*found, _whole(mlp.down_proj)]


def _whole(linear: Any) -> Part:
    width = getattr(linear, "out_features", None)
    if not isinstance(width, int):
        raise UnsupportedPattern("a projection of it is no linear layer")
    return Part(linear, 0, width)


def _split(joined: nn.Module, widths: list[int]) -> list[Part]:
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return [Part(joined, start, width) for start, width in zip(starts, widths, strict=True)]


def _epsilon(norm: nn.Module, codes: Codes) -> float:
    alike = is_built(norm, [set()], codes.norm) and [name for name, _ in norm.named_parameters()] == ["weight"]
    require(alike, "its norms are not RMS norms with one weight")
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(epsilon, float):
        raise UnsupportedPattern("a norm of it has no epsilon")
    return epsilon
