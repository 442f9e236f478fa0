"""The kinds of packed weights: words of float32 or bfloat16, bf12, int8 with scales; and the operands that they need.

Knows which form of an operand a kind is multiplied by. Does not know products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba.extending
import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from model_worker.cpu.simd.bf12 import HAS_BF12
from model_worker.cpu.simd.elements import INSIDE
from model_worker.cpu.simd.fixed_point import Digits, room_for, split

overload: Any = numba.extending.overload


class Kind(NamedTuple):
    """The kind of a product's weights."""

    like: NDArray[Any]  # any array of the model's element type: uint16 stands for bfloat16
    digits: Digits | None  # None: panels are words of elements; for int8 panels, room for the operand
    bf12: bool | None = None  # whether words may be in bf12; None: they never are


def kind_for(element: Any) -> Kind:
    """Return the kind of panels of words of this element type."""
    return Kind(np.empty(1, element), None)


def may_be_bf12(kind: Kind) -> bool:
    """Whether there is a bf12 form of these panels, and instructions for it."""
    return HAS_BF12 and kind.digits is None and kind.like.dtype == np.uint16


def int8_kind_for(element: Any, cores: int, rows: int, elements: int) -> Kind:
    """Return the kind of int8 panels in a model of this element type.

    Operands have at most `rows` rows and `elements` elements.
    """
    like = np.empty(1, element)
    return Kind(like, room_for(cores, rows, elements, like))


def kind_at(kind: Kind, core: int) -> Any:
    """Return the kind with a core's own digits; for compiled callers, whose types must not leave open if there are
    any."""
    return kind if kind.digits is None else kind._replace(digits=Digits(*(array[core] for array in kind.digits)))


@overload(kind_at)
def _kind_at(kind: Any, core: int) -> Any:
    def none(kind: Any, core: int) -> Any:
        return kind

    def one(kind: Any, core: int) -> Any:
        digits = kind.digits
        own = Digits(digits.values[core], digits.starts[core], digits.factors[core])
        return Kind(kind.like, own, kind.bf12)

    return none if kind.types[1] is types.none else one


@njit(nogil=True, cache=True, **INSIDE)
def _prepare(operand: Any, like: Any, digits: Any) -> None:
    if digits is None:
        return
    split(operand, like, digits)


@njit(nogil=True, cache=True, **INSIDE)
def prepare(fresh: bool, operand: Any, kind: Any) -> None:
    """Prepare a core for its first piece of a product: operands of bytes are split into fixed-point digits."""
    if fresh:
        _prepare(operand, kind.like, kind.digits)
