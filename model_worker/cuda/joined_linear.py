"""Linear modules that take the same input, as one product. Their weights stay theirs, and lie one after the other.

Knows modules; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model_worker.cuda.fp8_linear import Fp8Linear, fp8_product


class JoinedLinear:
    """One product with the weights of several modules, whose parameters become parts of one piece of memory.

    It holds no tensor: each call reads the weights through the first module's parameters. So their memory is free as
    soon as the modules' parameters are replaced.
    """

    def __init__(self, linears: Sequence[nn.Linear] | Sequence[Fp8Linear]) -> None:
        """The modules have equal inputs, one dtype, and all of them a bias or none."""
        self._first = linears[0]
        self._outputs = sum(linear.out_features for linear in linears)
        if len(linears) > 1:
            parts = [list(linear.parameters(recurse=False)) for linear in linears]
            for parameters in zip(*parts, strict=True):
                _lay_together(parameters)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs of all modules, side by side."""
        first = self._first
        added = None if first.bias is None else first.bias.as_strided((self._outputs,), (1,))
        if isinstance(first, Fp8Linear):
            return fp8_product(x, self._whole(first.codes), first.scales.as_strided((1, self._outputs), (1, 1)), added)
        return nn.functional.linear(x, self._whole(first.weight), added)

    def _whole(self, weight: Tensor) -> Tensor:
        return weight.as_strided((self._outputs, weight.shape[1]), (weight.shape[1], 1))


def _lay_together(parameters: Sequence[Tensor]) -> None:
    """Put parameters one after the other, along the dimension of outputs: their first one, or that of a row's."""
    outputs = 1 if parameters[0].shape[0] == 1 else 0
    with torch.no_grad():
        whole = torch.cat([parameter.detach() for parameter in parameters], outputs)
    for parameter, part in zip(
        parameters, whole.split([one.shape[outputs] for one in parameters], outputs), strict=True
    ):
        parameter.data = part
