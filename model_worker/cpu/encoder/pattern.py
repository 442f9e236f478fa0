"""Recognises encoders whose layers are built like BERT's, by their modules: BERT and its kin, ELECTRA, DistilBERT.

Modules do not say all that a model does, so its states must be compared with the model's own: see
model_worker/pooling/verify.py. Knows the names of modules, and nothing of weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation

from model_worker.cpu.fused.pattern import UnsupportedPattern

# Ends of the names of linear modules that may have scales of their inputs for themselves: see pooling/smoothing.py.
OWN_SCALES = ("value", "v_lin")

_BERT = {"embeddings", "encoder", "pooler", "embeddings_project"}
_BERT_LAYER = {"attention", "intermediate", "output"}
_DISTILBERT = {"embeddings", "transformer"}
_DISTILBERT_LAYER = {"attention", "sa_layer_norm", "ffn", "output_layer_norm"}
_EXACT = (nn.GELU, GELUActivation)
_TANH = (NewGELUActivation, GELUTanh)
_UNLIKE = "its layers are not built like BERT's"


class LayerParts(NamedTuple):
    """The modules of a layer."""

    # Q, K, V, the projection of the heads, and the two of the MLP.
    linears: tuple[Any, Any, Any, Any, Any, Any]
    # After attention, and after the MLP.
    norms: tuple[Any, Any]
    activation: Any
    heads: int


def find_layers(model: Any) -> list[LayerParts]:
    """Return the layers of a model. Raises UnsupportedPattern with the reason."""
    children = {name for name, _ in model.named_children()}
    if children == _DISTILBERT:
        parts = [_distilbert_layer(layer) for layer in _list_of(model.transformer)]
    else:
        require(children <= _BERT and {"embeddings", "encoder"} <= children, "its parts are not those of BERT")
        parts = [_bert_layer(layer) for layer in _list_of(model.encoder)]
    require(len({part.heads for part in parts}) == 1, "its layers have different numbers of heads")
    return parts


def require_form(model: nn.Module) -> None:
    """Raise UnsupportedPattern for a model whose layers are not built like BERT's."""
    uses_tanh(find_layers(model))


def uses_tanh(layers: list[LayerParts]) -> bool:
    """Whether the activation is GELU's approximation by a tanh, and not GELU itself. Raises UnsupportedPattern for
    another one."""
    activations = {type(layer.activation) for layer in layers}
    tanh = activations <= set(_TANH)
    require(tanh or activations <= set(_EXACT), "its activation is not GELU")
    return tanh


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise UnsupportedPattern(reason)


def _list_of(encoder: Any) -> list[Any]:
    only_layers = [name for name, _ in encoder.named_children()] == ["layer"]
    require(only_layers and len(encoder.layer) > 0, "its encoder has more than layers")
    return list(encoder.layer)


def _names(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _bert_layer(layer: Any) -> LayerParts:
    require(_names(layer) == _BERT_LAYER, _UNLIKE)
    try:
        attention = getattr(layer.attention, "self")  # noqa: B009 - reads better than a dot before self
        out = layer.attention.output
        linears = (
            attention.query,
            attention.key,
            attention.value,
            out.dense,
            layer.intermediate.dense,
            layer.output.dense,
        )
        activation = layer.intermediate.intermediate_act_fn
        return LayerParts(linears, (out.LayerNorm, layer.output.LayerNorm), activation, attention.num_attention_heads)
    except AttributeError as error:
        raise UnsupportedPattern(_UNLIKE) from error


def _distilbert_layer(layer: Any) -> LayerParts:
    require(_names(layer) == _DISTILBERT_LAYER, _UNLIKE)
    try:
        attention = layer.attention
        ffn = layer.ffn
        linears = (attention.q_lin, attention.k_lin, attention.v_lin, attention.out_lin, ffn.lin1, ffn.lin2)
        return LayerParts(linears, (layer.sa_layer_norm, layer.output_layer_norm), ffn.activation, attention.n_heads)
    except AttributeError as error:
        raise UnsupportedPattern(_UNLIKE) from error
