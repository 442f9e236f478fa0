"""Runs the layers of an encoder like BERT's in one compiled call, from embeddings to the last hidden states.

Recognises the model by its modules, and reads the weights that its packed linear modules hold. Modules do not say all
that a model does, so its states must be compared with the model's own: see model_worker/pooling/verify.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation

from model_worker.cpu.encoder.phases import (
    BLOCK_TOKENS,
    EncoderBuffers,
    EncoderWeights,
    EncoderWork,
    most_layers,
    run_encoder,
)
from model_worker.cpu.fused.pattern import UnsupportedPattern
from model_worker.cpu.gemm.int8_format import int8_format
from model_worker.cpu.gemm.int8_linear import Int8Linear
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cpu.gemm.weight_format import WeightFormat
from model_worker.cpu.simd.dot_bf16 import operand_dtype
from model_worker.cpu.simd.fixed_point import width_of
from model_worker.cpu.threads import thread_pool

_CHILDREN = {"embeddings", "encoder", "pooler"}
_LAYER = {"attention", "intermediate", "output"}
_EXACT = (nn.GELU, GELUActivation)
_TANH = (NewGELUActivation, GELUTanh)

# Ends of the names of linear modules that may have scales of their inputs for themselves: see pooling/smoothing.py.
OWN_SCALES = ("value",)

Packed = PackedLinear | Int8Linear


class EncoderLayers:
    """The layers of a model, and buffers that grow with the largest batch."""

    def __init__(self, model: nn.Module, coarse: bool = True) -> None:
        """Take a model whose linear modules are packed. Raises UnsupportedPattern with the reason.

        `coarse`: with int8 weights, activations have eight bits where that is most likely enough.
        """
        layers = _layers(model)
        self._linears = [_linears(layer) for layer in layers]
        self._cores = torch.get_num_threads()
        first = self._linears[0]
        self._hidden = first[0].out_features
        self._dtype = first[0].dtype
        self._weights = _weights(layers, self._linears)
        self.is_int8 = isinstance(first[0], Int8Linear)
        self._coarse = coarse
        element = np.uint16 if self._dtype == torch.bfloat16 else np.float32
        self._operand = operand_dtype(element)
        self._first_scales = [torch.from_numpy(_scales(linear)) for linear in (first[0], first[2])]
        self._buffers, self._formats = self._make_room(1)

    def run(self, x: Tensor, starts: Sequence[int]) -> Tensor:
        """Turn the embeddings `x` float32 [T, hidden] into the last hidden states, in place.

        `starts` are the places where each text begins, and all end.
        """
        states = x.numpy()
        tokens = len(states)
        if tokens > len(self._buffers.qkv):
            self._buffers, self._formats = self._make_room(max(tokens, 2 * len(self._buffers.qkv)))
        hidden, of_values, qkv, heads, inner = self._buffers
        buffers = EncoderBuffers(hidden[:tokens], of_values[:tokens], qkv[:tokens], heads[:tokens], inner)
        for operand, scales in zip((buffers.of_values, buffers.hidden), reversed(self._first_scales), strict=True):
            scaled = x * scales
            if self._operand == np.float32:
                operand[:, : self._hidden] = scaled.numpy()
            else:
                operand[:, : self._hidden] = scaled.to(torch.bfloat16).view(torch.uint16).numpy()
        bounds = np.array(starts, np.int64)
        work = EncoderWork(states, bounds, int(np.diff(bounds).max()), self._weights, buffers)
        thread_pool(self._cores).run(run_encoder, self._cores, work, *self._formats)
        return x

    def _make_room(self, tokens: int) -> tuple[EncoderBuffers, tuple[WeightFormat, ...]]:
        """Make buffers, and the formats of most weights, of those of values, and of DOWN's."""
        q, _, _, out, _, down = self._linears[0]
        at_a_time = min(tokens, self._cores * BLOCK_TOKENS)
        hidden = np.zeros((tokens, q.input_width), self._operand)
        buffers = EncoderBuffers(
            hidden=hidden,
            of_values=np.zeros_like(hidden) if len(self._weights.value_scales) else hidden,
            qkv=np.zeros((tokens, 3 * self._hidden), np.float32),
            heads=np.zeros((tokens, out.input_width), self._operand),
            inner=np.zeros((at_a_time, down.input_width), self._operand),
        )
        if not self.is_int8:
            plain = q.weight_format(self._cores, at_a_time, 0)
            return buffers, (plain, plain, plain)
        # Eight bits of a state are enough, and sixteen of what is between the products of the MLP, whose greatest
        # elements are far from the others. What that takes from vectors is judged at load.
        element = np.int8 if self._coarse else np.uint16
        room = self._cores, at_a_time, at_a_time * width_of(q.input_width)
        usual = int8_format(element, *room)
        of_values = int8_format(element, *room) if len(self._weights.value_scales) else usual
        fine = int8_format(np.uint16, self._cores, at_a_time, at_a_time * width_of(down.input_width))
        return buffers, (usual, of_values, fine)


def require_form(model: nn.Module) -> None:
    """Raise UnsupportedPattern for a model whose layers are not built like BERT's."""
    _tanh(_layers(model))


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise UnsupportedPattern(reason)


def _layers(model: Any) -> list[Any]:
    """Return the layers of a model whose modules are BERT's."""
    children = {name for name, _ in model.named_children()}
    _require(children <= _CHILDREN and {"embeddings", "encoder"} <= children, "its parts are not those of BERT")
    only_layers = [name for name, _ in model.encoder.named_children()] == ["layer"]
    _require(only_layers and len(model.encoder.layer) > 0, "its encoder has more than layers")
    layers = list(model.encoder.layer)
    _require(len(layers) <= most_layers(), "it has too many layers")
    for layer in layers:
        _require({name for name, _ in layer.named_children()} == _LAYER, "its layers are not built like BERT's")
    return layers


def _linears(layer: Any) -> list[Packed]:
    """Return Q, K, V, the projection of the heads, and the two of the MLP."""
    try:
        attention = getattr(layer.attention, "self")  # noqa: B009 - reads better than a dot before self
        found = [
            attention.query,
            attention.key,
            attention.value,
            layer.attention.output.dense,
            layer.intermediate.dense,
            layer.output.dense,
        ]
    except AttributeError as error:
        raise UnsupportedPattern("its layers are not built like BERT's") from error
    _require(all(isinstance(linear, Packed) for linear in found), "a linear layer of it is not packed")
    q, k, v, out, up, down = found
    hidden = q.out_features
    fitting = {q.out_features, k.out_features, v.out_features, out.in_features, out.out_features, up.in_features}
    _require(fitting == {hidden} and q.in_features == hidden == down.out_features, "its layers change the width")
    _require(up.out_features == down.in_features, "its MLP has other widths inside")
    _require(len({type(linear) for linear in found}) == 1, "its linear layers are of different kinds")
    _require(len({linear.dtype for linear in found}) == 1, "its linear layers are of different types")
    _require(len({linear.input_width for linear in (q, k, v, up)}) == 1, "its packed layers have different widths")
    same = np.array_equal(_scales(q), _scales(k))
    _require(same, "its queries and keys are of operands that are scaled in different ways")
    return found


def _weights(layers: list[Any], linears: list[list[Packed]]) -> EncoderWeights:
    first = getattr(layers[0].attention, "self")  # noqa: B009
    norms = [(layer.attention.output.LayerNorm, layer.output.LayerNorm) for layer in layers]
    every_norm = [norm for pair in norms for norm in pair]
    plain = all(type(norm) is nn.LayerNorm and norm.weight is not None for norm in every_norm)
    _require(plain and len({norm.eps for norm in every_norm}) == 1, "its norms are not plain layer norms")
    _require(len({linear.out_features for row in linears for linear in row[4:5]}) == 1, "its layers differ in width")
    apart = any(not np.array_equal(_scales(row[0]), _scales(row[2])) for row in linears)
    following = [*linears[1:], linears[0]]
    return EncoderWeights(
        panels=np.array([[linear.panels.ctypes.data for linear in row] for row in linears], np.int64),
        qkv_biases=np.stack([np.concatenate([_bias(linear) for linear in row[:3]]) for row in linears]),
        out_biases=np.stack([_bias(row[3]) for row in linears]),
        up_biases=np.stack([_bias(row[4]) for row in linears]),
        down_biases=np.stack([_bias(row[5]) for row in linears]),
        norms=np.stack(
            [np.stack([_float(part) for norm in pair for part in (norm.weight, norm.bias)]) for pair in norms]
        ),
        hidden_scales=np.stack(
            [np.stack([_scales(row[4]), _scales(after[0])]) for row, after in zip(linears, following, strict=True)]
        ),
        value_scales=np.stack([_scales(row[2]) for row in following])[: len(linears) if apart else 0],
        heads_scales=np.stack([_scales(row[3]) for row in linears]),
        inner_scales=np.stack([_scales(row[5]) for row in linears]),
        epsilon=np.float32(every_norm[0].eps),
        heads=int(first.num_attention_heads),
        scale=np.float32((linears[0][0].out_features // first.num_attention_heads) ** -0.5),
        tanh=_tanh(layers),
    )


def _tanh(layers: list[Any]) -> bool:
    """Whether the activation is GELU's approximation by a tanh, and not GELU itself."""
    activations = {type(getattr(layer.intermediate, "intermediate_act_fn", None)) for layer in layers}
    tanh = activations <= set(_TANH)
    _require(tanh or activations <= set(_EXACT), "its activation is not GELU")
    return tanh


def _bias(linear: Packed) -> NDArray[np.float32]:
    return np.zeros(linear.out_features, np.float32) if linear.bias is None else _float(linear.bias)


def _scales(linear: Packed) -> NDArray[np.float32]:
    """Return what the operand of a linear layer is multiplied by, beside what the model computes."""
    scales = linear.input_scales
    return np.ones(linear.in_features, np.float32) if scales is None else _float(scales)


def _float(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().float().numpy()
    return array
