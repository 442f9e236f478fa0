"""Runs the layers of an encoder in one compiled call, from embeddings to the last hidden states, or one by one.

Reads the weights that the packed linear modules of a recognised model hold (pattern.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_worker.cpu.encoder.pattern import EncoderForm, LayerParts, find_form, require
from model_worker.cpu.encoder.phases import BLOCK_TOKENS, most_layers, run_encoder
from model_worker.cpu.encoder.places import PlaceTables
from model_worker.cpu.encoder.shares import FEWER_BITS_COST, PassCost, deal
from model_worker.cpu.encoder.work import WEIGHTS, EncoderBuffers, EncoderWeights, EncoderWork, of_layer
from model_worker.cpu.gemm.int8_format import int8_format
from model_worker.cpu.gemm.int8_linear import Int8Linear
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cpu.gemm.weight_format import WeightFormat
from model_worker.cpu.simd.dot_bf16 import operand_dtype
from model_worker.cpu.simd.fixed_point import width_of
from model_worker.cpu.threads import ThreadPool, thread_pool

Packed = PackedLinear | Int8Linear


class EncoderLayers:
    """The layers of a model, and buffers that grow with the largest batch."""

    def __init__(self, model: nn.Module, coarse: bool = True) -> None:
        """Take a model whose linear modules are packed. Raises UnsupportedPattern with the reason.

        `coarse`: with int8 weights, activations have eight bits where that is most likely enough, and attention's
        products are of bfloat16 where the processor multiplies that.
        """
        form = find_form(model)
        layers = form.layers
        require(len(layers) <= most_layers(), "it has too many layers")
        self._linears = [_require_fitting(layer) for layer in layers]
        self._cores = torch.get_num_threads()
        self._cost = _cost(self._linears)
        first = self._linears[0]
        self._hidden = first[0].out_features
        self._dtype = first[0].dtype
        self._places = PlaceTables(form, self._hidden // layers[0].heads)
        self._weights = _weights(form, self._linears, self._places.kinds)
        self.is_int8 = isinstance(first[0], Int8Linear)
        self._coarse = coarse
        element = np.uint16 if self._dtype == torch.bfloat16 else np.float32
        self._operand = operand_dtype(element)
        half = self._dtype == torch.bfloat16 or (self.is_int8 and coarse)
        self._like = np.empty(1, operand_dtype(np.uint16 if half else np.float32))
        self._first_norm = form.first_norm
        self._first_scales = [torch.from_numpy(_scales(linear)) for linear in (first[0], first[2])]
        self._buffers, self._formats = self._make_room(1)

    @property
    def most_cores(self) -> int:
        """The most cores that have buffers."""
        return self._cores

    def run(self, x: Tensor, starts: Sequence[int], seen: Sequence[int] | None = None) -> Tensor:
        """Turn the embeddings `x` float32 [T, hidden] into the last hidden states, in place.

        `starts` are the places where each text begins, and all end; `seen` the tokens of each text that its tokens
        see, the first ones: all without it.
        """
        self._read(x)
        bounds = np.array(starts, np.int64)
        lengths = np.diff(bounds)
        keys = lengths if seen is None else np.array(seen, np.int64)
        cores, shares = deal(self._cost.of(lengths), lengths, self._cores)
        work = self._work(x, bounds, keys, self._weights)
        thread_pool(cores).run(run_encoder, cores, work, shares, *self._formats)
        return x

    def run_layer(self, number: int, x: Tensor, pool: ThreadPool) -> None:
        """Run layer `number` of one text, whose tokens see all others, on the threads of a pool.

        `x` float32 [T, hidden] are the embeddings before the first layer, and become the last hidden states in the last
        one. A text's layers come in order, and no other text's between them. The pool has at most `most_cores`.
        """
        if number == 0:
            self._read(x)
        bounds = np.array([0, len(x)])
        work = self._work(x, bounds, bounds[1:], of_layer(self._weights, number))
        together = np.array([0, 1])
        pool.run(run_encoder, pool.cores, work, together, *self._formats)

    def _read(self, x: Tensor) -> None:
        """Write the operands of the first layer, of embeddings [T, hidden]."""
        tokens = len(x)
        if tokens > len(self._buffers.qkv):
            self._buffers, self._formats = self._make_room(max(tokens, 2 * len(self._buffers.qkv)))
        first = x if self._first_norm is None else self._first_norm(x.to(self._dtype)).float()
        operands = (self._buffers.of_values[:tokens], self._buffers.hidden[:tokens])
        for operand, scales in zip(operands, reversed(self._first_scales), strict=True):
            scaled = first * scales
            if self._operand == np.float32:
                operand[:, : self._hidden] = scaled.numpy()
            else:
                operand[:, : self._hidden] = scaled.to(torch.bfloat16).view(torch.uint16).numpy()

    def _work(
        self, x: Tensor, bounds: NDArray[np.int64], keys: NDArray[np.int64], weights: EncoderWeights
    ) -> EncoderWork:
        """Return the arguments of a pass through layers of these weights."""
        hidden, of_values, qkv, heads, inner = self._buffers
        tokens = len(x)
        buffers = EncoderBuffers(hidden[:tokens], of_values[:tokens], qkv[:tokens], heads[:tokens], inner)
        longest = int(np.diff(bounds).max())
        places = self._places.of_length(longest)
        return EncoderWork(x.numpy(), bounds, keys, longest, weights, buffers, places, self._like)

    def _make_room(self, tokens: int) -> tuple[EncoderBuffers, tuple[WeightFormat, ...]]:
        """Make buffers, and the formats of most weights, of those of values, and of DOWN's."""
        q, _, _, out, _, down, *_ = self._linears[0]
        at_a_time = min(tokens, self._cores * BLOCK_TOKENS)
        # Each core may have a share of texts to itself.
        inner_rows = self._cores * min(tokens, BLOCK_TOKENS)
        hidden = np.zeros((tokens, q.input_width), self._operand)
        buffers = EncoderBuffers(
            hidden=hidden,
            of_values=np.zeros_like(hidden) if len(self._weights.value_scales) else hidden,
            qkv=np.zeros((tokens, 3 * self._hidden), np.float32),
            heads=np.zeros((tokens, out.input_width), self._operand),
            inner=np.zeros((inner_rows, down.input_width), self._operand),
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


def _require_fitting(layer: LayerParts) -> list[Packed]:
    """Return the linear layers of a layer, its gate last, which must be packed and of like kind."""
    linears = list(layer.linears) if layer.gate is None else [*layer.linears, layer.gate]
    require(all(isinstance(linear, Packed) for linear in linears), "a linear layer of it is not packed")
    q, k, v, out, up, down, *gates = linears
    hidden = q.out_features
    fitting = {q.out_features, k.out_features, v.out_features, out.in_features, out.out_features, up.in_features}
    require(fitting == {hidden} and q.in_features == hidden == down.out_features, "its layers change the width")
    require(up.out_features == down.in_features, "its MLP has other widths inside")
    require(len({type(linear) for linear in linears}) == 1, "its linear layers are of different kinds")
    require(len({linear.dtype for linear in linears}) == 1, "its linear layers are of different types")
    require(len({linear.input_width for linear in (q, k, v, up)}) == 1, "its packed layers have different widths")
    for one, other in ((q, k), *((up, gate) for gate in gates)):
        require(one.out_features == other.out_features, "its gate has another width than what it opens")
        same = np.array_equal(_scales(one), _scales(other))
        require(same, "layers of it that read the same have operands that are scaled in different ways")
    return linears


def _cost(linears: list[list[Packed]]) -> PassCost:
    """Return the cost of a pass through these layers, in operations of float32."""
    first = linears[0][0]
    share = FEWER_BITS_COST if isinstance(first, Int8Linear) or operand_dtype(first.element) != np.float32 else 1.0
    products = sum(2 * linear.in_features * linear.out_features for row in linears for linear in row)
    # Scores, and sums of values.
    return PassCost(share * products, 4.0 * first.out_features * len(linears))


def _weights(form: EncoderForm, linears: list[list[Packed]], tables: list[str]) -> EncoderWeights:
    layers = form.layers
    every_norm = [norm for layer in layers for norm in layer.norms]
    if form.norms_first and type(form.first_norm) is not nn.Identity:
        every_norm.append(form.first_norm)
    plain = all(type(norm) is nn.LayerNorm and norm.weight is not None for norm in every_norm)
    require(plain and len({norm.eps for norm in every_norm}) == 1, "its norms are not plain layer norms")
    require(len({row[4].out_features for row in linears}) == 1, "its layers differ in width")
    apart = any(not np.array_equal(_scales(row[0]), _scales(row[2])) for row in linears)
    following = [*linears[1:], linears[0]]
    heads = layers[0].heads
    return EncoderWeights(
        panels=np.array([_addresses(row) for row in linears], np.int64),
        qkv_biases=np.stack([np.concatenate([_bias(linear) for linear in row[:3]]) for row in linears]),
        out_biases=np.stack([_bias(row[3]) for row in linears]),
        up_biases=np.stack([np.stack([_bias((*row, row[4])[6]), _bias(row[4])]) for row in linears]),
        down_biases=np.stack([_bias(row[5]) for row in linears]),
        norms=np.stack([np.concatenate([_norm(norm) for norm in layer.norms]) for layer in layers]),
        hidden_scales=np.stack(
            [np.stack([_scales(row[4]), _scales(after[0])]) for row, after in zip(linears, following, strict=True)]
        ),
        value_scales=np.stack([_scales(row[2]) for row in following])[: len(linears) if apart else 0],
        heads_scales=np.stack([_scales(row[3]) for row in linears]),
        inner_scales=np.stack([_scales(row[5]) for row in linears]),
        epsilon=np.float32(every_norm[0].eps),
        heads=heads,
        scale=np.float32((linears[0][0].out_features // heads) ** -0.5),
        activation=form.activation,
        norms_first=form.norms_first,
        ends=True,
        windows=np.array([layer.window for layer in layers], np.int64),
        angles=np.array([0 if layer.rotary is None else tables.index(layer.rotary) for layer in layers], np.int64),
    )


def _addresses(row: list[Packed]) -> list[int]:
    """Return the addresses of a layer's panels, in the order of work.WEIGHTS."""
    found = [int(linear.panels.ctypes.data) for linear in row]
    return found + [0] * (WEIGHTS - len(found))


def _norm(norm: Any) -> NDArray[np.float32]:
    """Return the weight and the bias of a norm."""
    weight = _float(norm.weight)
    return np.stack([weight, np.zeros_like(weight) if norm.bias is None else _float(norm.bias)])


def _bias(linear: Packed) -> NDArray[np.float32]:
    return np.zeros(linear.out_features, np.float32) if linear.bias is None else _float(linear.bias)


def _scales(linear: Packed) -> NDArray[np.float32]:
    """Return what the operand of a linear layer is multiplied by, beside what the model computes."""
    scales = linear.input_scales
    return np.ones(linear.in_features, np.float32) if scales is None else _float(scales)


def _float(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().float().numpy()
    return array
