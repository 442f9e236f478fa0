"""Recognises encoders whose layers are attention and an MLP around layer norms, by their modules.

BERT and its kin, ELECTRA, DistilBERT and MPNet (a bias for each distance); with rotated queries and keys Nomic, GTE and
Jina v3; ModernBERT, which norms first and has windows; and the encoder of Whisper. Modules do not say all that a model
does, so its states must be compared with the model's own: see model_worker/pooling/verify.py. Knows the names of
modules; knows no weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

from model_worker.cpu.encoder.joined import JoinedLinear
from model_worker.cpu.simd.activations import GELU, GELU_TANH, SILU
from model_worker.decoder_form import UnsupportedPattern

# Ends of the names of linear modules that may have scales of their inputs for themselves: see pooling/smoothing.py.
OWN_SCALES = ("value", "v_lin", "v_proj", "v")

_BERT = {"embeddings", "encoder", "pooler", "embeddings_project"}
_BERT_LAYER = {"attention", "intermediate", "output"}
_DISTILBERT = {"embeddings", "transformer"}
_DISTILBERT_LAYER = {"attention", "sa_layer_norm", "ffn", "output_layer_norm"}
_ROTARY = {"embeddings", "pooler", "rotary_emb", "layers"}
_ROTARY_LAYER = {"post_attention_layernorm", "post_mlp_layernorm", "mlp", "self_attn"}
_MODERNBERT = {"embeddings", "layers", "final_norm", "rotary_emb"}
_MODERNBERT_LAYER = {"attn_norm", "attn", "mlp_norm", "mlp"}
_WHISPER = {"conv1", "conv2", "embed_positions", "layers", "layer_norm"}
_WHISPER_LAYER = {"self_attn", "self_attn_layer_norm", "activation_fn", "fc1", "fc2", "final_layer_norm"}
_ACTIVATIONS = {
    nn.GELU: GELU,
    GELUActivation: GELU,
    NewGELUActivation: GELU_TANH,
    GELUTanh: GELU_TANH,
    nn.SiLU: SILU,
    SiLUActivation: SILU,
}
# Frequencies that do not depend on the length of a text.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
_UNLIKE = "its layers are not built like BERT's"


class LayerParts(NamedTuple):
    """The modules of a layer."""

    # Q, K, V, the projection of the heads, and the two of the MLP.
    linears: tuple[Any, Any, Any, Any, Any, Any]
    # After attention, and after the MLP; with norms first before the MLP, and before the next layer or at the end.
    norms: tuple[Any, Any]
    activation: Any
    heads: int
    # What is activated and then multiplied with the MLP's first projection.
    gate: Any = None
    # Tokens that are less than so many apart see each other; 0 for all.
    window: int = 0
    # The frequencies that turn queries and keys, if any do: their name, empty where all layers have the same.
    rotary: str | None = None


class EncoderForm(NamedTuple):
    """The layers of an encoder, and what is around them."""

    layers: list[LayerParts]
    # Whether a layer norms what attention and the MLP read, and not what they add up to.
    norms_first: bool = False
    # With norms first, that of the first layer.
    first_norm: Any = None
    # Turns queries and keys.
    rotary: Any = None
    # Has a bias for each distance of two tokens.
    distances: Any = None

    @property
    def activation(self) -> int:
        """The code of the activation in all layers. Raises UnsupportedPattern for one that is not computed."""
        found = {_ACTIVATIONS.get(type(layer.activation)) for layer in self.layers}
        code = found.pop() if len(found) == 1 else None
        if code is None or (code == SILU and self.layers[0].gate is None):
            raise UnsupportedPattern("its activation is not GELU, nor a gate with SiLU")
        return code


def find_form(model: Any) -> EncoderForm:
    """Return the form of a model. Raises UnsupportedPattern with the reason."""
    children = _names(model)
    try:
        if children == _DISTILBERT:
            form = EncoderForm([_distilbert_layer(layer) for layer in _list_of(model.transformer)])
        elif children == _MODERNBERT:
            form = _modernbert(model)
        elif children == _WHISPER:
            form = _whisper(model)
        elif children <= _ROTARY and {"embeddings", "rotary_emb", "layers"} <= children:
            _require_fixed(model.rotary_emb.rope_type)
            form = EncoderForm([_rotary_layer(layer) for layer in model.layers], rotary=model.rotary_emb)
        else:
            require(children <= _BERT and {"embeddings", "encoder"} <= children, "its parts are not those of BERT")
            form = _bert(model.encoder)
    except AttributeError as error:
        raise UnsupportedPattern(_UNLIKE) from error
    require(len(form.layers) > 0, "it has no layers")
    require(len({part.heads for part in form.layers}) == 1, "its layers have different numbers of heads")
    require(len({part.gate is None for part in form.layers}) == 1, "some of its layers have gates")
    return form


def require_form(model: nn.Module) -> None:
    """Raise UnsupportedPattern for a model of another form."""
    _ = find_form(model).activation


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise UnsupportedPattern(reason)


def _list_of(encoder: Any) -> list[Any]:
    only_layers = _names(encoder) <= {"layer", "relative_attention_bias"} and hasattr(encoder, "layer")
    require(only_layers and len(encoder.layer) > 0, "its encoder has more than layers")
    return list(encoder.layer)


def _names(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _require_fixed(kind: Any) -> None:
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    require(all(each in _FIXED_ROTARY for each in kinds), "its frequencies depend on the length of a text")


def _bert(encoder: Any) -> EncoderForm:
    layers = _list_of(encoder)
    if hasattr(encoder, "relative_attention_bias"):
        return EncoderForm([_mpnet_layer(layer) for layer in layers], distances=encoder)
    return EncoderForm([_bert_layer(layer) for layer in layers])


def _bert_layer(layer: Any) -> LayerParts:
    require(_names(layer) == _BERT_LAYER, _UNLIKE)
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


def _mpnet_layer(layer: Any) -> LayerParts:
    require(_names(layer) == _BERT_LAYER, _UNLIKE)
    attention = layer.attention.attn
    linears = (
        attention.q,
        attention.k,
        attention.v,
        attention.o,
        layer.intermediate.dense,
        layer.output.dense,
    )
    norms = (layer.attention.LayerNorm, layer.output.LayerNorm)
    return LayerParts(linears, norms, layer.intermediate.intermediate_act_fn, attention.num_attention_heads)


def _distilbert_layer(layer: Any) -> LayerParts:
    require(_names(layer) == _DISTILBERT_LAYER, _UNLIKE)
    attention = layer.attention
    ffn = layer.ffn
    linears = (attention.q_lin, attention.k_lin, attention.v_lin, attention.out_lin, ffn.lin1, ffn.lin2)
    return LayerParts(linears, (layer.sa_layer_norm, layer.output_layer_norm), ffn.activation, attention.n_heads)


def _rotary_layer(layer: Any) -> LayerParts:
    """Return the parts of a layer as Nomic, GTE (with gates) and Jina v3 (without) have it."""
    require(_names(layer) - {"post_attention_dropout", "post_mlp_dropout"} == _ROTARY_LAYER, _UNLIKE)
    attention = layer.self_attn
    mlp = layer.mlp
    gated = hasattr(mlp, "gate_proj")
    projections = (mlp.up_proj, mlp.down_proj) if gated else (mlp.fc1, mlp.fc2)
    return LayerParts(
        linears=(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, *projections),
        norms=(layer.post_attention_layernorm, layer.post_mlp_layernorm),
        activation=mlp.act_fn if gated else mlp.activation_fn,
        heads=attention.config.num_attention_heads,
        gate=mlp.gate_proj if gated else None,
        rotary="",
    )


def _modernbert(model: Any) -> EncoderForm:
    _require_fixed(model.rotary_emb.rope_type)
    layers = list(model.layers)
    require(all(_names(layer) == _MODERNBERT_LAYER for layer in layers), _UNLIKE)
    following = [*(layer.attn_norm for layer in layers[1:]), model.final_norm]
    parts = [_modernbert_layer(layer, norm) for layer, norm in zip(layers, following, strict=True)]
    return EncoderForm(parts, norms_first=True, first_norm=layers[0].attn_norm, rotary=model.rotary_emb)


def _modernbert_layer(layer: Any, following: Any) -> LayerParts:
    attention = layer.attn
    joined = all(isinstance(linear, JoinedLinear) for linear in (attention.Wqkv, layer.mlp.Wi))
    require(joined, "its joined linear layers have not been separated")
    q, k, v = attention.Wqkv.children()
    gate, up = layer.mlp.Wi.children()
    return LayerParts(
        linears=(q, k, v, attention.Wo, up, layer.mlp.Wo),
        norms=(layer.mlp_norm, following),
        activation=layer.mlp.act,
        heads=attention.config.num_attention_heads,
        gate=gate,
        window=attention.sliding_window or 0,
        rotary=layer.attention_type,
    )


def _whisper(encoder: Any) -> EncoderForm:
    """Return the form of the layers behind the convolutions and the positions."""
    layers = list(encoder.layers)
    require(all(_names(layer) == _WHISPER_LAYER for layer in layers), _UNLIKE)
    following = [*(layer.self_attn_layer_norm for layer in layers[1:]), encoder.layer_norm]
    parts = [_whisper_layer(layer, norm) for layer, norm in zip(layers, following, strict=True)]
    return EncoderForm(parts, norms_first=True, first_norm=layers[0].self_attn_layer_norm)


def _whisper_layer(layer: Any, following: Any) -> LayerParts:
    attention = layer.self_attn
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, layer.fc1, layer.fc2)
    return LayerParts(linears, (layer.final_layer_norm, following), layer.activation_fn, attention.num_heads)
