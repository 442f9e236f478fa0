"""Weights of whole numbers with a scale and a zero for each group of inputs; those of AWQ and GPTQ have names alike.

What differs between formats is how numbers are packed. Knows tensors; knows no names of models.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model_worker.cpu.gemm.coded_panels import UnsupportedCodes
from model_worker.cpu.simd.dot_codes import GROUP_INPUTS
from model_worker.loading.quantized.bits import WORD_BITS, check_scales, check_words, spread
from model_worker.loading.quantized.stored_weight import StoredWeight
from model_worker.loading.stored import Pool, Stored
from shared.weight_codes import Codes, Grouped

_MOST_ZERO = np.iinfo(np.uint8).max


class Parts(NamedTuple):
    """Some outputs of a weight: scales * (codes - zeros)."""

    codes: Tensor  # uint8 [outputs, inputs]
    zeros: Tensor | int  # [outputs, groups] of a whole type, or one for all
    scales: Tensor  # [outputs, groups], as they are stored


class GroupedWeight(StoredWeight):
    """A weight [outputs, inputs] of codes of so many bits.

    `groups` is the group of each input, or how many neighbours share one.
    """

    def __init__(self, shape: tuple[int, int], bits: int, groups: Tensor | int) -> None:
        self.shape = shape
        self._bits = bits
        self._groups = groups

    @abstractmethod
    def parts(self, first: int, last: int) -> Parts:
        """Read some outputs."""

    def rows(self, first: int, last: int) -> Tensor:
        codes, zeros, scales = self.parts(first, last)
        offsets = zeros if isinstance(zeros, int) else self._along(zeros.float())
        return (codes.float() - offsets) * self._along(scales.float())

    def _along(self, values: Tensor) -> Tensor:
        """Return the number of each input, [outputs, inputs], by those of groups."""
        return spread(values, self.shape[1], self._groups) if isinstance(self._groups, int) else values[:, self._groups]

    @property
    def codes(self) -> Callable[[int, int], Codes] | None:
        groups = self._groups
        width = groups if isinstance(groups, int) else int((groups == 0).sum())
        # A row is equal groups, each of them whole ones of panels.
        if width < 1 or width % GROUP_INPUTS or self.shape[1] % width:
            return None
        if not isinstance(groups, int) and not bool((groups.bincount() == width).all()):
            return None
        return self._codes_of

    def _codes_of(self, first: int, last: int) -> Codes:
        codes, zeros, scales = self.parts(first, last)
        if not isinstance(zeros, int) and int(zeros.max()) > _MOST_ZERO:
            raise UnsupportedCodes(f"it has a zero of {int(zeros.max())}")
        order = None if isinstance(self._groups, int) else self._groups.argsort(stable=True)
        if order is not None:
            # Panels have the inputs of a group side by side.
            codes = codes[:, order]
        base = scales if scales.dtype == torch.float16 else scales.float()
        offsets = zeros if isinstance(zeros, int) else zeros.to(torch.uint8).numpy()
        columns = None if order is None else order.to(torch.int32).numpy()
        return Codes(codes.numpy(), self._bits, Grouped(base.numpy()), offsets, order=columns)


class Qweight(NamedTuple):
    """The tensors of a weight of AWQ or GPTQ, and the name of the weight."""

    target: str
    codes: Stored
    zeros: Stored
    scales: Stored

    @property
    def module(self) -> str:
        return self.codes.name.removesuffix("qweight")


def qweights(pool: Pool) -> Iterator[Qweight]:
    """Find the weights with tensors qweight, qzeros and scales, and take their codes. ValueError if one is missing."""
    for name in pool:
        module, dot, kind = name.rpartition(".")
        if kind != "qweight":
            continue
        scales = pool.peek(f"{module}.scales")
        zeros = pool.peek(f"{module}.qzeros")
        if scales is None or zeros is None:
            raise ValueError(f"{name} has no {'scales' if scales is None else 'qzeros'} beside it")
        codes = pool.take(name)
        check_words(codes, zeros)
        yield Qweight(f"{module}{dot}weight", codes, zeros, scales)


def take_scales(pool: Pool, found: Qweight, outputs: int, bits: int) -> int:
    """Take the scales and zeros of a weight, and return how many groups they are for. ValueError for other shapes."""
    codes, zeros, scales = found[1:]
    groups = scales.shape[0]
    if zeros.shape != (groups, outputs * bits // WORD_BITS) or scales.shape != (groups, outputs):
        raise ValueError(
            f"{codes.name} {list(codes.shape)}, its qzeros {list(zeros.shape)} and scales {list(scales.shape)} do not "
            f"fit {bits} bits"
        )
    check_scales(pool.take(scales.name))
    pool.take(zeros.name)
    return groups
