"""Linear layers on a CPU: weights reordered once, at load, into panels, the order in which our kernels read them.

Knows how to swap the plain linear modules of a loaded model, for these or for int8 ones, and how oneDNN's order looks
in memory, which is the same on processors with AVX-512, so that it too can read the one copy there is. Does not know
any architecture, nor the purpose of a layer.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from model_worker.cpu.gemm.coded_linear import CodedLinear, UnsupportedCodes, WordLinear, can_be_words
from model_worker.cpu.gemm.embedding import pack_tables, tables_of
from model_worker.cpu.gemm.encoded_linear import EncodedLinear, QuantizedWeight
from model_worker.cpu.gemm.int8_linear import Int8Linear, Quantized, quantize
from model_worker.cpu.gemm.panel_linear import PanelLinear
from model_worker.cpu.gemm.weight_format import LANE_BYTES, PANEL
from model_worker.cpu.gemm.word_format import WordFormat, word_format
from model_worker.cpu.huge_pages import keep_in_huge_pages
from model_worker.cpu.simd.fixed_point import MOST_INPUTS

log = logging.getLogger(__name__)

PACKED_DTYPES = (torch.bfloat16, torch.float32)
# Relative error of a packed module against the one it replaces: another order of summation, nothing more.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
# oneDNN chooses the order of weights for a batch size; this is its choice for all but single rows.
_ROWS_HINT = 512

Progress = Callable[[int, int], None]


class PackedLinear(PanelLinear):
    """A linear layer whose weight exists only in panels, in oneDNN's memory if its order is the same.

    oneDNN multiplies bfloat16 on processors with AVX-512 alone, and has other orders on others: there the panels are
    our own, and so is the product. torch's own, without oneDNN, takes tens of times as long.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(tuple(weight.shape), bias, weight.dtype)
        plain = weight.detach()
        packed = torch.ops.mkldnn._reorder_linear_weight(plain, _ROWS_HINT) if _onednn_packs(weight.dtype) else None
        found = None if packed is None else _panels_of(packed, plain)
        self.packed: Tensor | None = None if found is None else packed
        # Words [panel, step, PANEL]. A word is what one output feature takes from the input at one step: one float32,
        # or two bfloat16 of neighbouring input features, the first in the lower half. Both dimensions are padded with
        # zeros.
        self.panels: NDArray[np.uint32] = _panels(plain) if found is None else found

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return self.multiply(x)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    @property
    def weight(self) -> Tensor:
        if self.packed is not None:
            return self.packed.to_dense()
        words = torch.from_numpy(self.panels.view(np.int32)).transpose(1, 2).contiguous()
        rows = words.reshape(len(self.panels) * PANEL, -1)
        return rows.view(self.dtype)[: self.out_features, : self.in_features]

    @property
    def input_width(self) -> int:
        return int(self.panels.shape[1]) * LANE_BYTES // self.dtype.itemsize

    def weight_format(self, cores: int, rows: int, elements: int) -> WordFormat:
        return word_format(self.element)


Packed = PackedLinear | Int8Linear | CodedLinear


@functools.cache
def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies weights of this type here."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(PANEL, PANEL, dtype=dtype), _ROWS_HINT)
    except RuntimeError:
        return False
    return True


def _panels_of(packed: Tensor, weight: Tensor) -> NDArray[np.uint32] | None:
    """Return oneDNN's memory as panels, if it lies in this order."""
    outputs, inputs = weight.shape
    count = -(-outputs // PANEL)
    size = int(torch.ops.mkldnn._nbytes(packed))
    steps = size // (count * PANEL * LANE_BYTES)
    if size != count * PANEL * LANE_BYTES * steps or steps * LANE_BYTES < inputs * weight.itemsize:
        return None
    memory: Any = (ctypes.c_uint32 * (size // LANE_BYTES)).from_address(torch.ops.mkldnn.data_ptr(packed))
    words = np.ctypeslib.as_array(memory).reshape(count, steps, PANEL)
    # The first and the last panel show the order; what lies between them follows it too.
    ends = ((words[:1], weight[:PANEL]), (words[-1:], weight[(count - 1) * PANEL :]))
    return words if all(np.array_equal(got, _panels(rows, steps)) for got, rows in ends) else None


def _panels(weight: Tensor, steps: int | None = None) -> NDArray[np.uint32]:
    """Reorder a plain weight as panels of `steps` steps, or as few as it takes."""
    outputs, inputs = weight.shape
    width = (steps or -(-inputs * weight.itemsize // LANE_BYTES)) * LANE_BYTES // weight.itemsize
    padded = functional.pad(weight, (0, width - inputs, 0, -outputs % PANEL))
    words = padded.view(torch.int32).reshape(-1, PANEL, width * weight.itemsize // LANE_BYTES)
    panels: NDArray[np.uint32] = words.transpose(1, 2).contiguous().numpy().view(np.uint32)
    return panels


def quantize_linears(model: nn.Module) -> dict[nn.Module, Quantized]:
    """Quantize the weight of every plain linear module of a CPU model to int8. Returns the quantized weight of each.

    A weight that another module shares, such as a tied embedding's, stays there as it is.
    """
    quantized: dict[nn.Module, Quantized] = {}
    for module in model.modules():
        if isinstance(module, EncodedLinear):
            if module.in_features <= MOST_INPUTS:
                quantized[module] = module.source.quantized()
                module.source.let_go()
                module.source = QuantizedWeight(quantized[module])
        elif is_plain(module) and _can_be_quantized(weight := _weight(module)):
            quantized[module] = quantize(weight)
            module.weight = nn.Parameter(quantized[module].weight.to(weight.dtype), requires_grad=False)
    return quantized


def pack_linears(
    model: nn.Module, progress: Progress | None = None, quantized: dict[nn.Module, Quantized] | None = None
) -> list[Packed]:
    """Swap every plain linear module of a CPU model for a packed one that is verified. Returns all that are packed.

    Encoded weights whose codes panels hold keep them, where the model computes in bfloat16. In a model with weights in
    codes the others get panels like theirs, so that one format has them all.
    Those that `quantize_linears` has quantized become int8 ones, and leave `quantized`, so that no weight is kept
    twice. One that another module shares, such as a tied embedding's, stays there beside its packed copy, unless this
    is in panels of codes. An encoded one is decoded for that, one at a time.
    """
    tables = tables_of(model)
    in_codes = not quantized
    if in_codes:
        _keep_codes(model, progress)
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    linears = [(parent, name, child) for parent, name, child in found if _can_be_packed(child)]
    coded = [module for module in model.modules() if isinstance(module, CodedLinear)]
    swapped: dict[nn.Module, nn.Module | None] = {}
    for done, (parent, name, linear) in enumerate(linears, start=1):
        if linear not in swapped:
            plain = _plain(linear) if isinstance(linear, EncodedLinear) else linear
            proven = _proven(plain, None if quantized is None else quantized.pop(linear, None), bool(coded))
            swapped[linear] = plain if proven is None and plain is not linear else proven
            if isinstance(linear, EncodedLinear):
                # What is found here keeps the module until the end, and need not keep its weight.
                linear.source.let_go()
                del linear.source
        packed = swapped[linear]
        if packed is not None:
            setattr(parent, name, packed)
        if progress is not None:
            progress(done, len(linears))
    packed_ones: list[Packed] = [*coded, *(packed for packed in swapped.values() if isinstance(packed, Packed))]
    packed_ones = list(dict.fromkeys([*packed_ones, *pack_tables(tables, in_codes)]))
    panels = [packed.panels for packed in packed_ones]
    # Moving what is there takes half a second for a quarter of a gigabyte, and may be done while it is read.
    Thread(target=keep_in_huge_pages, args=(panels,), kwargs={"written": True}, name="huge-pages").start()
    return packed_ones


def _plain(linear: EncodedLinear) -> nn.Linear:
    return linear.plain(nn.Parameter(linear.weight, requires_grad=False))


def keeps_codes(model: nn.Module) -> bool:
    """Whether some weights stay in codes when the model is packed."""
    return any(isinstance(module, EncodedLinear) and _has_codes(module) for module in model.modules())


def _has_codes(linear: EncodedLinear) -> bool:
    return linear.dtype == torch.bfloat16 and linear.source.codes is not None


def _keep_codes(model: nn.Module, progress: Progress | None) -> None:
    """Swap encoded linear modules for verified ones in codes. Those that panels cannot hold stay as they are."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    linears = [(at, name, one) for at, name, one in found if isinstance(one, EncodedLinear) and _has_codes(one)]
    kept: dict[nn.Module, CodedLinear | None] = {}
    for done, (parent, name, linear) in enumerate(linears, start=1):
        if linear not in kept:
            kept[linear] = _in_codes(linear)
            linear.source.let_go()
        coded = kept[linear]
        if coded is not None:
            setattr(parent, name, coded)
        if progress is not None:
            progress(done, len(linears))


def _in_codes(linear: EncodedLinear) -> CodedLinear | None:
    """Return a linear module whose weight stays in codes, if its first outputs are those of the decoded weight."""
    read = linear.source.codes
    if read is None:
        return None
    try:
        coded = CodedLinear((linear.out_features, linear.in_features), linear.bias, linear.dtype, read)
    except UnsupportedCodes as reason:
        log.info("a weight of %d outputs is decoded, since %s", linear.out_features, reason)
        return None
    outputs = min(linear.out_features, PANEL)
    with torch.inference_mode():
        x = torch.randn(2, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.dtype)
        bias = None if linear.bias is None else linear.bias[:outputs].float()
        want = functional.linear(x.float(), linear.source.rows(0, outputs), bias)
        got = coded(x)[:, :outputs].float()
    return coded if agree(got, want, linear.dtype) else None


def _can_be_packed(module: nn.Module) -> bool:
    return is_plain(module) or (isinstance(module, EncodedLinear) and torch.backends.mkldnn.is_available())


def is_plain(module: nn.Module) -> bool:
    """Whether swapping the module changes nothing but its forward pass."""
    hooks: tuple[Any, ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return (
        type(module) is nn.Linear
        and not any(hooks)
        and "forward" not in vars(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype in PACKED_DTYPES
        and module.weight.dim() == 2
        and module.weight.numel() > 0
        and torch.backends.mkldnn.is_available()
    )


def _can_be_quantized(weight: Tensor) -> bool:
    """Whether int8 can represent the weight, and products with it stay within 32 bits."""
    return weight.shape[1] <= MOST_INPUTS and bool(torch.isfinite(weight).all())


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _proven(linear: nn.Module, quantized: Quantized | None, among_codes: bool) -> Packed | None:
    """Return the packed form of a linear module, if it computes the same."""
    weight = _weight(linear)
    bias = linear.bias
    assert bias is None or isinstance(bias, Tensor)
    packed: Packed
    with torch.inference_mode():
        if quantized is not None:
            packed = Int8Linear(quantized, bias, weight.dtype)
        elif among_codes and can_be_words(weight):
            packed = WordLinear(weight, bias, weight.dtype)
        else:
            packed = PackedLinear(weight, bias)
        x = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        want = linear(x).float()
        got = packed(x).float()
    return packed if agree(got, want, weight.dtype) else None


def agree(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Whether products are the same but for their order of summation."""
    # A weight that is all zeros leaves nothing to divide by; its packed form must be exact then.
    error = (got - want).norm() / want.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return float(error) < TOLERANCE[dtype]
