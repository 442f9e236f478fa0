"""Recognises models made of norm, attention, norm and gated MLP (llama, mistral, qwen2, qwen3, phi3...), by structure.

Knows the modules of such a model, and the names in their forward passes, which is how a multiplier or a rotation that
is left out in some layers would show. Does not know names of models, nor how the weights are run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from model_worker.cpu.fused.layer import Weights
from model_worker.cpu.gemm.coded_linear import CodedLinear
from model_worker.cpu.gemm.embedding import CodedEmbedding
from model_worker.cpu.gemm.packed_linear import Packed
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.simd.dot_bf16 import LANES
from model_worker.kv_cache import LayerShape

if TYPE_CHECKING:
    from model_worker.model import LoadedModel

_MODEL = [{"model", "lm_head"}]
_DECODER = [{"embed_tokens", "layers", "norm", "rotary_emb"}]
_PLAIN_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_LAYER = [_PLAIN_LAYER, _PLAIN_LAYER | {"resid_attn_dropout", "resid_mlp_dropout"}]
_SPLIT = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ATTENTION = [_SPLIT, _SPLIT | {"q_norm", "k_norm"}, {"qkv_proj", "o_proj"}]
_MLP = [{"gate_proj", "up_proj", "down_proj", "act_fn"}, {"gate_up_proj", "down_proj", "activation_fn"}]
_NOTHING = np.empty(0, np.float32)


def _mentioned(*modules: type[nn.Module]) -> set[str]:
    """Collect all attributes and globals that the forward passes of these modules name."""
    return {name for module in modules for name in inspect.unwrap(module.forward).__code__.co_names}


_MODEL_CODE = _mentioned(
    llama.LlamaForCausalLM, mistral.MistralForCausalLM, qwen2.Qwen2ForCausalLM, qwen3.Qwen3ForCausalLM
)
_DECODER_CODE = _mentioned(
    llama.LlamaModel,
    mistral.MistralModel,
    qwen2.Qwen2Model,
    qwen3.Qwen3Model,
    qwen2_vl.Qwen2VLTextModel,
    qwen3_vl.Qwen3VLTextModel,
)
_LAYER_CODE = _mentioned(llama.LlamaDecoderLayer, qwen2.Qwen2DecoderLayer, phi3.Phi3DecoderLayer)
_ATTENTION_CODE = _mentioned(
    llama.LlamaAttention,
    mistral.MistralAttention,
    qwen2.Qwen2Attention,
    qwen2_vl.Qwen2VLAttention,
    qwen3.Qwen3Attention,
    qwen3_vl.Qwen3VLTextAttention,
    phi3.Phi3Attention,
)
_MLP_CODE = _mentioned(llama.LlamaMLP, phi3.Phi3MLP)
_NORM_CODE = _mentioned(llama.LlamaRMSNorm)


class UnsupportedPattern(Exception):
    """The model does not match the stack's pattern; the message completes "since"."""


class Projection(NamedTuple):
    """Some output features of a packed module: all of them, or one of the projections that a model has joined."""

    linear: Packed
    first: int
    width: int

    def address_in(self, panels: NDArray[Any]) -> int:
        """Return the projection's address in these panels of the module."""
        return int(panels.ctypes.data) + self.first // PANEL * int(panels[0].nbytes)

    @property
    def input_width(self) -> int:
        """Input features, with padding."""
        return self.linear.input_width

    @property
    def order(self) -> NDArray[np.int32] | None:
        """Return the order in which the panels have the inputs, where it is another one."""
        return self.linear.order if isinstance(self.linear, CodedLinear) else None

    @property
    def bias(self) -> NDArray[np.float32]:
        if self.linear.bias is None:
            return np.zeros(self.width, np.float32)
        return _float(self.linear.bias)[self.first : self.first + self.width]


class DecoderWeights:
    """The weights of a decoder, found by structure; raises UnsupportedPattern at the first module that does not fit."""

    def __init__(self, loaded: LoadedModel) -> None:
        model: Any = loaded.model
        decoder = model.get_decoder()
        _require(
            _is(model, _MODEL, _MODEL_CODE) and _is(decoder, _DECODER, _DECODER_CODE),
            "its decoder is not built like Llama's",
        )
        rotary = list(inspect.signature(decoder.rotary_emb.forward).parameters)
        _require(rotary == ["x", "position_ids"], "its rotary embedding differs by layer")
        self.embedding: nn.Module = decoder.embed_tokens
        self.rotary: nn.Module = decoder.rotary_emb
        self._loaded = loaded
        self._final_norm = decoder.norm
        self._layers = list(decoder.layers)
        self._check_layers()
        self.order = [loaded.attention.layer_of[layer.self_attn] for layer in self._layers]
        shape = loaded.attention.layout.layers[0]
        self.projections = [_projections(layer, shape) for layer in self._layers]
        self.head = _projection(model.lm_head)
        self._check_shapes(shape)
        self.q_heads = self.projections[0][0].width // shape.k_dim
        self._head_dim = shape.k_dim

    def _check_layers(self) -> None:
        attention = self._loaded.attention
        for layer in self._layers:
            _require(_is(layer, _LAYER, _LAYER_CODE), "its layers are not built like Llama's")
            _require(_is(layer.self_attn, _ATTENTION, _ATTENTION_CODE), "its attention is not built like Llama's")
            _require(_is(layer.mlp, _MLP, _MLP_CODE), "its MLP is not built like Llama's")
            activation = getattr(layer.mlp, "act_fn", None) or layer.mlp.activation_fn
            _require(type(activation).__name__ in ("SiLU", "SiLUActivation"), "its activation is not SiLU")
            _require(layer.self_attn in attention.layer_of, "a layer does not attend")
        alike = len(attention.params) == len(self._layers) and len(set(attention.layout.layers)) == 1
        _require(alike, "its layers have KV heads of different shapes")
        plain = all(params.softcap is None and params.sinks is None for params in attention.params)
        _require(plain, "its attention has a soft cap or sinks")

    def _check_shapes(self, shape: LayerShape) -> None:
        """Check that all layers are alike, with one kind of weights, and biases only where the kernel adds them."""
        _require(
            len({tuple(p.width for p in row) for row in self.projections}) == 1, "its layers have different widths"
        )
        used = [*(p for row in self.projections for p in row), self.head]
        alike = any(all(isinstance(p.linear, kind) for p in used) for kind in get_args(Packed))
        _require(alike, "its linear layers are of different kinds")
        fitting = all(p.linear.dtype == self._loaded.dtype and p.first % PANEL == 0 for p in used)
        _require(fitting, f"its linear layers have other types, or widths that are no multiples of {PANEL}")
        unbiased = (*(p for row in self.projections for p in row[3:]), self.head)
        _require(all(p.linear.bias is None for p in unbiased), "it has biases beside those of queries, keys and values")
        q, k, v, *_ = (p.width for p in self.projections[0])
        _require(shape.k_dim % LANES == 0 and shape.v_dim % LANES == 0, f"its heads are no multiples of {LANES}")
        heads = (shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim)
        _require((k, v) == heads and q % k == 0, "its projections are not those of its heads")

    def embedding_table(self) -> NDArray[Any] | None:
        """Return [vocabulary, hidden] in the model's dtype, if the embedding gives plain rows of it."""
        module = self.embedding
        if type(module) is not nn.Embedding or module.max_norm is not None or module.weight.dtype != self._loaded.dtype:
            return None
        weight = module.weight.detach()
        return (weight.view(torch.uint16) if weight.dtype == torch.bfloat16 else weight).numpy()

    def embedding_panels(self) -> CodedLinear | None:
        """Return the layer in whose panels of codes the embedding finds its rows, if it gives them as they are."""
        module = self.embedding
        if not isinstance(module, CodedEmbedding) or module.is_scaled or module.linear.order is not None:
            return None
        return module.linear

    @property
    def linears(self) -> list[Packed]:
        """The packed modules, each once."""
        used = (*(p for row in self.projections for p in row), self.head)
        return list({id(p.linear): p.linear for p in used}.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes that a pass reads at least."""
        return sum(linear.num_bytes for linear in self.linears)

    def operand_widths(self) -> tuple[int, int, int]:
        """Input features, with padding, of the products that read the hidden state, the heads and the MLP's inside."""
        rows = self.projections
        readers = (
            [self.head, *(row[i] for row in rows for i in (0, 1, 2, 4, 5))],
            [row[3] for row in rows],
            [row[6] for row in rows],
        )
        widths = [{projection.input_width for projection in group} for group in readers]
        _require(all(len(width) == 1 for width in widths), "its layers have different widths")
        hidden, heads, inner = (width.pop() for width in widths)
        return hidden, heads, inner

    def addresses(self, panels: Callable[[Packed], NDArray[Any]]) -> tuple[NDArray[np.int64], int]:
        """Return the addresses of the projections [L, 7] and of lm_head in these panels of their modules."""
        rows = [[p.address_in(panels(p.linear)) for p in row] for row in self.projections]
        return np.array(rows), self.head.address_in(panels(self.head.linear))

    def _orders(self) -> NDArray[np.int64]:
        """Return the addresses of the orders of inputs, [L, 4] by the operand, or 0. The linear modules own them."""
        _require(self.head.order is None, "its head has its inputs in another order")
        rows = []
        for row in self.projections:
            readers = row[:3], row[3:4], row[4:6], row[6:]
            orders = [[projection.order for projection in group] for group in readers]
            alike = all(_are_equal(order, group[0]) for group in orders for order in group)
            _require(alike, "linear layers of the same inputs have them in different orders")
            rows.append([0 if group[0] is None else group[0].ctypes.data for group in orders])
        return np.array(rows, np.int64)

    def weights(self) -> Weights:
        norms = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in self._layers]
        head_norms = [
            (layer.self_attn.q_norm, layer.self_attn.k_norm) if hasattr(layer.self_attn, "q_norm") else ()
            for layer in self._layers
        ]
        used = [norm for group in (*norms, *head_norms, (self._final_norm,)) for norm in group]
        epsilons = {_epsilon(norm) for norm in used}
        _require(len(epsilons) == 1, "its norms have different epsilons")
        widths = {tuple(norm.weight.shape) for group in head_norms for norm in group}
        _require(widths in (set(), {(self._head_dim,)}), "it normalises queries and keys across heads")
        panels, head = self.addresses(lambda linear: linear.panels)
        return Weights(
            panels=panels,
            orders=self._orders(),
            biases=np.stack([np.concatenate([projection.bias for projection in row[:3]]) for row in self.projections]),
            norms=np.array([[_float(norm.weight) for norm in pair] for pair in norms]),
            head_norms=np.array([[_float(norm.weight) for norm in pair] or [_NOTHING] * 2 for pair in head_norms]),
            final_norm=_float(self._final_norm.weight),
            head=head,
            screen=0,
            bounds=_NOTHING,
            mlp_width=self.projections[0][4].width,
            epsilon=np.float32(epsilons.pop()),
        )


def _are_equal(one: NDArray[np.int32] | None, other: NDArray[np.int32] | None) -> bool:
    return other is None if one is None else other is not None and np.array_equal(one, other)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise UnsupportedPattern(reason)


def _is(module: nn.Module, children: Collection[set[str]], code: set[str]) -> bool:
    """Whether a module's children are one of these sets, and its forward pass names nothing outside `code`."""
    return {name for name, _ in module.named_children()} in children and _mentioned(type(module)) <= code


def _projections(layer: Any, shape: LayerShape) -> list[Projection]:
    """Find the projections in the order of the kernel's names Q to DOWN."""
    attention = layer.self_attn
    mlp = layer.mlp
    if hasattr(attention, "qkv_proj"):
        k = shape.kv_heads * shape.k_dim
        v = shape.kv_heads * shape.v_dim
        joined = _projection(attention.qkv_proj)
        found = _split(joined, [joined.width - k - v, k, v])
    else:
        found = [_projection(module) for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
    found.append(_projection(attention.o_proj))
    if hasattr(mlp, "gate_up_proj"):
        joined = _projection(mlp.gate_up_proj)
        found += _split(joined, [joined.width // 2] * 2)
    else:
        found += [_projection(mlp.gate_proj), _projection(mlp.up_proj)]
    return [*found, _projection(mlp.down_proj)]


def _projection(module: nn.Module) -> Projection:
    if not isinstance(module, Packed):
        raise UnsupportedPattern("a linear layer of it is not packed")
    return Projection(module, 0, module.out_features)


def _split(joined: Projection, widths: list[int]) -> list[Projection]:
    starts = np.cumsum([0, *widths[:-1]]).tolist()
    return [Projection(joined.linear, start, width) for start, width in zip(starts, widths, strict=True)]


def _epsilon(norm: nn.Module) -> float:
    """Return the epsilon of an RMS norm."""
    alike = _is(norm, [set()], _NORM_CODE) and [name for name, _ in norm.named_parameters()] == ["weight"]
    _require(alike, "its norms are not RMS norms with one weight")
    epsilon = getattr(norm, "variance_epsilon", None)
    if not isinstance(epsilon, float):
        raise UnsupportedPattern("a norm of it has no epsilon")
    return epsilon


def _float(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().float().numpy()
    return array
