"""Linear modules that take the same input, as one product. Their weights stay theirs, and lie one after the other.

Knows modules; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class JoinedLinear:
    """One product with the weights of several modules, whose parameters become parts of one piece of memory.

    It holds no memory of its own: the weights are read through the first module's parameters. So whoever takes the
    modules' weights away has taken all.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        """The modules have equal inputs, one dtype, and all of them a bias or none."""
        self._first = linears[0]
        self._outputs = sum(linear.out_features for linear in linears)
        if len(linears) > 1:
            _lay_together([linear.weight for linear in linears])
            if self._first.bias is not None:
                _lay_together([linear.bias for linear in linears])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs of all modules, side by side."""
        weight = self._first.weight
        bias = self._first.bias
        whole = weight.as_strided((self._outputs, weight.shape[1]), (weight.shape[1], 1))
        added = None if bias is None else bias.as_strided((self._outputs,), (1,))
        return nn.functional.linear(x, whole, added)


def _lay_together(parameters: Sequence[Tensor]) -> None:
    """Put parameters one after the other, along their first dimension."""
    with torch.no_grad():
        whole = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = whole[start : start + parameter.shape[0]]
        start += parameter.shape[0]
