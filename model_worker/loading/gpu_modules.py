"""Replaces the arithmetic of a model's norms and gated layers on a GPU by Triton kernels: one launch for six, or two.

A module is known by what it has (a weight and an epsilon; linear layers gate, up and down), not by its architecture,
and only replaced if the kernel gives on random input what the module gives. Parameters stay where they are, and linear
layers are called as before, so adapters and new weights work as they do without. Of a group's model this rank's part is
proven by itself: a kernel may fail on one rank alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from model_worker.attention.triton import missing
from model_worker.joined_linear import JoinedLinear, apart
from model_worker.model import first_line

log = logging.getLogger(__name__)

Forward = Callable[[Tensor], Tensor]

# Of the largest element: one rounding to the dtype may differ.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# A row of a norm is in one program's registers.
_WIDEST_NORM = 1 << 14


class ReplacedModules:
    """The modules of a model whose forward was replaced."""

    def __init__(self, model: nn.Module) -> None:
        """Replace what can be. Nothing is where kernels are missing, or fail in any way."""
        self._replaced: list[nn.Module] = []
        if missing() is not None:
            return
        try:
            with torch.inference_mode(), apart(model):
                for module in model.modules():
                    if (forward := _proven(module)) is not None:
                        vars(module)["forward"] = forward
                        self._replaced.append(module)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers and drivers have errors of their own
            log.warning("norms and gated layers are transformers' own: %s", first_line(error))
            self.undo()

    def __len__(self) -> int:
        return len(self._replaced)

    def undo(self) -> None:
        """Let the modules compute as before."""
        for module in self._replaced:
            vars(module).pop("forward")
        self._replaced.clear()


def _proven(module: nn.Module) -> Forward | None:
    """Return a forward that gives what the module's own gives; None if there is none."""
    width = _width(module)
    parameter = next(module.parameters(), None)
    if width is None or parameter is None or parameter.dtype not in _TOLERANCE:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, width, generator=generator).to(parameter.device, parameter.dtype)
    want = module(x)
    if not isinstance(want, Tensor) or want.dtype != x.dtype:
        return None
    tolerance = _TOLERANCE[x.dtype] * float(want.float().abs().max())
    errors = [(float((forward(x).float() - want.float()).abs().max()), forward) for forward in _forwards(module)]
    error, best = min(errors, key=lambda pair: pair[0])
    return best if error <= tolerance else None


def _width(module: Any) -> int | None:
    """Return the width of the input of a module that may be a norm or a gated layer; None for another."""
    if _is_gated(module):
        return int(module.gate_proj.in_features)
    return int(module.weight.shape[0]) if _is_norm(module) else None


def _is_norm(module: Any) -> bool:
    return (
        type(module).__name__.endswith("RMSNorm")
        and [name for name, _ in module.named_parameters()] == ["weight"]
        and module.weight.dim() == 1
        and module.weight.shape[0] <= _WIDEST_NORM
        and _epsilon(module) is not None
    )


def _epsilon(module: Any) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(found) if isinstance(found, float) else None


def _is_gated(module: Any) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if isinstance(parts[2], JoinedLinear):
        parts[2] = parts[2].part
    return all(isinstance(part, nn.Linear) for part in parts) and len(list(module.children())) <= 4


def _forwards(module: Any) -> Iterator[Forward]:
    """Yield what the module may compute."""
    from model_worker.cuda import gate_kernel, norm_kernel

    if _is_gated(module):
        for activation in gate_kernel.ACTIVATIONS:

            def gated(x: Tensor, activation: int = activation) -> Tensor:
                result: Tensor = module.down_proj(gate_kernel.gated(module.gate_proj(x), module.up_proj(x), activation))
                return result

            yield gated
        return
    epsilon = _epsilon(module) or 0.0
    for form in norm_kernel.FORMS:

        def norm(x: Tensor, form: int = form) -> Tensor:
            return norm_kernel.rms_norm(x, module.weight, epsilon, form)

        yield norm
