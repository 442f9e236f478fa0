"""Linear layers on a CPU: weights reordered once, at load, into the order in which oneDNN reads them.

Knows how to swap the plain linear modules of a loaded model, for these or for int8 ones, and how oneDNN's order looks
in memory (`panels`), so that kernels of our own can read the one copy there is. Does not know any architecture, nor
what a layer is for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from model_worker.huge_pages import keep_in_huge_pages
from model_worker.int8_linear import Int8Linear, Rounded, rounded

PACKED_DTYPES = (torch.bfloat16, torch.float32)
PANEL = 64
"""Output features that lie side by side in a panel."""

# Relative error of a packed module against the one it replaces: another order of summation, nothing more.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
# oneDNN chooses the order of weights for a batch size; this is its choice for all but single rows.
_ROWS_HINT = 512

Progress = Callable[[int, int], None]


class PackedLinear(nn.Module):
    """A linear layer whose weight exists only in oneDNN's order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self.bias = None if bias is None else bias.detach()
        # The packed memory as words [panel, step, PANEL], or None if oneDNN chose another order on this machine. A word
        # is what one output feature takes from the input at one step: one float32, or two bfloat16 of neighbouring
        # input features, the first in the lower half. Both dimensions are padded with zeros.
        self.panels: NDArray[np.uint32] | None = self._find_panels(weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    @property
    def weight(self) -> Tensor:
        """The weight in its plain order, made anew: for models that look at it outside of forward."""
        return self.packed.to_dense()

    @property
    def input_width(self) -> int:
        """Input features, with padding. Only where there are panels."""
        assert self.panels is not None
        return int(self.panels.shape[1]) * 4 // self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return int(torch.ops.mkldnn._nbytes(self.packed))

    def _find_panels(self, weight: Tensor) -> NDArray[np.uint32] | None:
        count, steps = -(-self.out_features // PANEL), self.num_bytes // (-(-self.out_features // PANEL) * PANEL * 4)
        if self.num_bytes != count * PANEL * 4 * steps or steps * 4 < self.in_features * self.dtype.itemsize:
            return None
        memory: Any = (ctypes.c_uint32 * (self.num_bytes // 4)).from_address(torch.ops.mkldnn.data_ptr(self.packed))
        words = np.ctypeslib.as_array(memory).reshape(count, steps, PANEL)
        # The first and the last panel show the order; what lies between them follows it too.
        ends = ((words[0], weight[:PANEL]), (words[-1], weight[(count - 1) * PANEL :]))
        return words if all(np.array_equal(got, _panel(rows, steps)) for got, rows in ends) else None


def _panel(weight: Tensor, steps: int) -> NDArray[np.uint32]:
    """At most PANEL rows of a plain weight as one panel [steps, PANEL]."""
    width = steps * 4 // weight.element_size()
    padded = functional.pad(weight, (0, width - weight.shape[1], 0, PANEL - weight.shape[0]))
    words = padded.view(torch.int16 if weight.element_size() == 2 else torch.int32).numpy().view(np.uint32)
    return words.T


def round_linears(model: nn.Module) -> dict[nn.Module, Rounded]:
    """Give every plain linear module of a CPU model the weight that int8 can say. Returns what it says for each.

    A weight that another module shares, such as a tied embedding's, stays there as it is.
    """
    said: dict[nn.Module, Rounded] = {}
    for module in model.modules():
        if _is_plain(module) and torch.isfinite(weight := _weight(module)).all():
            said[module] = rounded(weight)
            module.weight = nn.Parameter(said[module].weight.to(weight.dtype), requires_grad=False)
    return said


def pack_linears(
    model: nn.Module, progress: Progress | None = None, said: dict[nn.Module, Rounded] | None = None
) -> list[PackedLinear | Int8Linear]:
    """Swap every plain linear module of a CPU model for a packed one that is proven equal. Returns the packed ones.

    Those that `round_linears` has rounded become int8 ones, and leave `said`, so that no weight is kept twice. One that
    another module shares, such as a tied embedding's, stays there beside its packed copy.
    """
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    linears = [(parent, name, child) for parent, name, child in found if _is_plain(child)]
    swapped: dict[nn.Module, PackedLinear | Int8Linear | None] = {}
    for done, (parent, name, linear) in enumerate(linears, start=1):
        if linear not in swapped:
            swapped[linear] = _proven(linear, None if said is None else said.pop(linear, None))
        packed = swapped[linear]
        if packed is not None:
            setattr(parent, name, packed)
        if progress is not None:
            progress(done, len(linears))
    packed_ones = [packed for packed in swapped.values() if packed is not None]
    panels = [packed.panels for packed in packed_ones if packed.panels is not None]
    # Moving what is there takes half a second for a quarter of a gigabyte, and may be done while it is read.
    Thread(target=keep_in_huge_pages, args=(panels,), kwargs={"written": True}, name="huge-pages").start()
    return packed_ones


def _is_plain(module: nn.Module) -> bool:
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


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _proven(linear: nn.Module, said: Rounded | None) -> PackedLinear | Int8Linear | None:
    """The packed form of a linear module, if it computes the same."""
    weight, bias = _weight(linear), linear.bias
    assert bias is None or isinstance(bias, Tensor)
    packed: PackedLinear | Int8Linear
    with torch.inference_mode():
        packed = PackedLinear(weight, bias) if said is None else Int8Linear(said, bias, weight.dtype)
        x = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        want, got = linear(x).float(), packed(x).float()
    # A weight that is all zeros leaves nothing to divide by; its packed form must be exact then.
    error = (got - want).norm() / want.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return packed if float(error) < TOLERANCE[weight.dtype] else None
