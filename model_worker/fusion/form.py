"""Recognises models made of norm, attention, norm and gated MLP (llama, mistral, qwen2, qwen3...), by their structure.

Knows what such a model is made of: its modules, and what their forward passes mention, which is how a multiplier or a
rotation that is left out in some layers would show. Does not know names of models, nor how the parts are run.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from model_worker.fusion.kernel import Weights
from model_worker.linears import PackedLinear

if TYPE_CHECKING:
    from model_worker.loader import LoadedModel

_MODEL = {"model", "lm_head"}
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_NOTHING = np.empty(0, np.float32)


def _mentioned(*modules: type[nn.Module]) -> set[str]:
    """All attributes and globals that the forward passes of these modules name."""
    return {name for module in modules for name in inspect.unwrap(module.forward).__code__.co_names}


_MODEL_CODE = _mentioned(
    llama.LlamaForCausalLM, mistral.MistralForCausalLM, qwen2.Qwen2ForCausalLM, qwen3.Qwen3ForCausalLM
)
_DECODER_CODE = _mentioned(llama.LlamaModel, mistral.MistralModel, qwen2.Qwen2Model, qwen3.Qwen3Model)
_LAYER_CODE = _mentioned(
    llama.LlamaDecoderLayer, mistral.MistralDecoderLayer, qwen2.Qwen2DecoderLayer, qwen3.Qwen3DecoderLayer
)
_ATTENTION_CODE = _mentioned(llama.LlamaAttention, mistral.MistralAttention, qwen2.Qwen2Attention, qwen3.Qwen3Attention)
_MLP_CODE, _NORM_CODE = _mentioned(llama.LlamaMLP), _mentioned(llama.LlamaRMSNorm)


class OtherForm(Exception):
    """The model is not of the form that the stack computes."""


class Parts:
    """The modules of a model, found by structure; raises OtherForm at the first that does not fit."""

    def __init__(self, loaded: LoadedModel) -> None:
        model: Any = loaded.model
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        _require(_is(model, _MODEL, _MODEL_CODE) and _is(decoder, _DECODER, _DECODER_CODE))
        self.loaded, self.decoder, self.head = loaded, decoder, head
        self.embedding: nn.Module = decoder.embed_tokens
        self.rotary: nn.Module = decoder.rotary_emb
        self.layers: list[Any] = list(decoder.layers)
        _require(
            bool(self.layers)
            and list(inspect.signature(decoder.rotary_emb.forward).parameters) == ["x", "position_ids"]
        )
        for layer in self.layers:
            self._check_layer(layer)
        self.order = [loaded.attention.layer_of[layer.self_attn] for layer in self.layers]
        self._check_attention()
        self.linears = [[self._linear(module) for module in _linears(layer)] for layer in self.layers]
        self.head_linear = self._linear(head)
        _require(head.bias is None and all(linear.bias is None for row in self.linears for linear in row[3:]))
        self.head_dim = loaded.attention.layout.layers[0].k_dim

    def _check_layer(self, layer: Any) -> None:
        _require(_is(layer, _LAYER, _LAYER_CODE) and _is(layer.mlp, _MLP, _MLP_CODE))
        attention = _ATTENTION | _HEAD_NORMS if hasattr(layer.self_attn, "q_norm") else _ATTENTION
        _require(_is(layer.self_attn, attention, _ATTENTION_CODE))
        _require(type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation"))
        _require(layer.self_attn in self.loaded.attention.layer_of)

    def _check_attention(self) -> None:
        attention = self.loaded.attention
        _require(len(attention.params) == len(self.layers) and len(set(attention.layout.layers)) == 1)
        _require(all(params.softcap is None and params.sinks is None for params in attention.params))

    def _linear(self, module: Any) -> PackedLinear:
        _require(isinstance(module, PackedLinear) and module.dtype == self.loaded.dtype and module.panels() is not None)
        linear: PackedLinear = module
        return linear

    def operand_widths(self) -> tuple[int, int, int]:
        """Input features, with padding, of what reads the hidden state, the heads and the MLP's inside."""

        def width(linears: list[PackedLinear]) -> int:
            steps = {linear.panels().shape[1] for linear in linears}  # type: ignore[union-attr]
            _require(len(steps) == 1)
            return int(steps.pop()) * 4 // self.loaded.dtype.itemsize

        rows = self.linears
        hidden = [linear for row in rows for linear in (*row[:3], row[4], row[5])]
        return width([*hidden, self.head_linear]), width([row[3] for row in rows]), width([row[6] for row in rows])

    def weights(self) -> Weights:
        norms = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in self.layers]
        head_norms = [
            (layer.self_attn.q_norm, layer.self_attn.k_norm) if hasattr(layer.self_attn, "q_norm") else ()
            for layer in self.layers
        ]
        final = self.decoder.norm
        used = [norm for group in (*norms, *head_norms, (final,)) for norm in group]
        epsilons = {_epsilon(norm) for norm in used}
        _require(len(epsilons) == 1)
        widths = {tuple(norm.weight.shape) for group in head_norms for norm in group}
        _require(widths in (set(), {(self.head_dim,)}))
        return Weights(
            panels=np.array([[linear.panels().ctypes.data for linear in row] for row in self.linears]),  # type: ignore[union-attr]
            biases=np.stack([np.concatenate([_bias(linear) for linear in row[:3]]) for row in self.linears]),
            norms=np.stack([[_float(norm.weight) for norm in pair] for pair in norms]),
            head_norms=np.array(
                [[_float(norm.weight) for norm in pair] or [_NOTHING, _NOTHING] for pair in head_norms], np.float32
            ),
            final_norm=_float(final.weight),
            head=self.head_linear.panels().ctypes.data,  # type: ignore[union-attr]
            mlp_width=self.linears[0][4].out_features,
            epsilon=np.float32(epsilons.pop()),
        )


def _require(condition: bool) -> None:
    if not condition:
        raise OtherForm


def _is(module: nn.Module, children: set[str], code: set[str]) -> bool:
    """Whether it has just these children, and names nothing in its forward pass but what `code` has."""
    return {name for name, _ in module.named_children()} == children and _mentioned(type(module)) <= code


def _linears(layer: Any) -> tuple[Any, ...]:
    """In the order of the kernel's names Q to DOWN."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )


def _epsilon(norm: nn.Module) -> float:
    """Of an RMS norm."""
    _require(_is(norm, set(), _NORM_CODE) and [name for name, _ in norm.named_parameters()] == ["weight"])
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    _require(isinstance(epsilon, float))
    return float(epsilon)  # type: ignore[arg-type]


def _float(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().float().numpy()
    return array


def _bias(linear: PackedLinear) -> NDArray[np.float32]:
    return np.zeros(linear.out_features, np.float32) if linear.bias is None else _float(linear.bias)
