"""The weights of a decoder of Llama's form (decoder_form.py), as the fused stack reads them in packed modules.

Knows the forms and widths of weights that the kernels take. Does not know how a pass runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_worker.cpu.fused.layer import Weights
from model_worker.cpu.gemm.coded_linear import CodedLinear
from model_worker.cpu.gemm.embedding import CodedEmbedding
from model_worker.cpu.gemm.packed_linear import Packed
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.simd.dot_bf16 import LANES
from model_worker.decoder_form import LLAMA, DecoderForm, Part, UnsupportedPattern, decoder_form, epsilon_of, require
from model_worker.kv_cache import LayerShape

if TYPE_CHECKING:
    from model_worker.model import LoadedModel

_NOTHING = np.empty(0, np.float32)


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
        form = decoder_form(loaded.model, loaded.attention, LLAMA)
        self.embedding: nn.Module = form.embedding
        self.rotary: nn.Module = form.rotary
        self._loaded = loaded
        self._form = form
        self._check_arithmetic(form)
        self.order = form.order
        self.projections = [[_projection(part) for part in layer.parts] for layer in form.layers]
        self.head = _projection(Part(form.head, 0, form.head.out_features))
        self._check_shapes(form.shape)
        self.q_heads = form.q_heads

    def _check_arithmetic(self, form: DecoderForm) -> None:
        silu = all(type(layer.activation).__name__ in ("SiLU", "SiLUActivation") for layer in form.layers)
        require(silu, "its activation is not SiLU")
        plain = all(params.softcap is None and params.sinks is None for params in self._loaded.attention.params)
        require(plain, "its attention has a soft cap or sinks")

    def _check_shapes(self, shape: LayerShape) -> None:
        """Check that all layers are alike, with one kind of weights, and biases only where the kernel adds them."""
        used = [*(p for row in self.projections for p in row), self.head]
        alike = any(all(isinstance(p.linear, kind) for p in used) for kind in get_args(Packed))
        require(alike, "its linear layers are of different kinds")
        fitting = all(p.linear.dtype == self._loaded.dtype and p.first % PANEL == 0 for p in used)
        require(fitting, f"its linear layers have other types, or widths that are no multiples of {PANEL}")
        unbiased = (*(p for row in self.projections for p in row[3:]), self.head)
        require(all(p.linear.bias is None for p in unbiased), "it has biases beside those of queries, keys and values")
        require(shape.k_dim % LANES == 0 and shape.v_dim % LANES == 0, f"its heads are no multiples of {LANES}")

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
        require(all(len(width) == 1 for width in widths), "its layers have different widths")
        hidden, heads, inner = (width.pop() for width in widths)
        return hidden, heads, inner

    def addresses(self, panels: Callable[[Packed], NDArray[Any]]) -> tuple[NDArray[np.int64], int]:
        """Return the addresses of the projections [L, 7] and of lm_head in these panels of their modules."""
        rows = [[p.address_in(panels(p.linear)) for p in row] for row in self.projections]
        return np.array(rows), self.head.address_in(panels(self.head.linear))

    def _orders(self) -> NDArray[np.int64]:
        """Return the addresses of the orders of inputs, [L, 4] by the operand, or 0. The linear modules own them."""
        require(self.head.order is None, "its head has its inputs in another order")
        rows = []
        for row in self.projections:
            readers = row[:3], row[3:4], row[4:6], row[6:]
            orders = [[projection.order for projection in group] for group in readers]
            alike = all(_are_equal(order, group[0]) for group in orders for order in group)
            require(alike, "linear layers of the same inputs have them in different orders")
            rows.append([0 if group[0] is None else group[0].ctypes.data for group in orders])
        return np.array(rows, np.int64)

    def weights(self) -> Weights:
        form = self._form
        head_norms = [layer.of_heads or () for layer in form.layers]
        epsilon = epsilon_of([*(norm for layer in form.layers for norm in layer.norms), form.final_norm], LLAMA)
        widths = {tuple(norm.weight.shape) for group in head_norms for norm in group}
        require(widths in (set(), {(form.shape.k_dim,)}), "it normalises queries and keys across heads")
        panels, head = self.addresses(lambda linear: linear.panels)
        return Weights(
            panels=panels,
            orders=self._orders(),
            biases=np.stack([np.concatenate([projection.bias for projection in row[:3]]) for row in self.projections]),
            norms=np.array([[_float(norm.weight) for norm in layer.before] for layer in form.layers]),
            head_norms=np.array([[_float(norm.weight) for norm in pair] or [_NOTHING] * 2 for pair in head_norms]),
            final_norm=_float(form.final_norm.weight),
            head=head,
            screen=0,
            bounds=_NOTHING,
            mlp_width=self.projections[0][4].width,
            epsilon=np.float32(epsilon),
        )


def _are_equal(one: NDArray[np.int32] | None, other: NDArray[np.int32] | None) -> bool:
    return other is None if one is None else other is not None and np.array_equal(one, other)


def _projection(part: Part) -> Projection:
    if not isinstance(part.linear, Packed):
        raise UnsupportedPattern("a linear layer of it is not packed")
    return Projection(part.linear, part.first, part.width)


def _float(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().float().numpy()
    return array
