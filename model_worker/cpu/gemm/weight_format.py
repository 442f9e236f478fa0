"""The seam between products and the formats of packed weights.

A weight lies in panels of PANEL outputs. A format says how a panel is found, how many rows a piece has, how often a
piece passes over its panel, and what there is to prefetch; and it multiplies. Products (products.py) ask the format, so
a new one is a file of its own, beside the module that packs its weights: word_format.py is the shortest example.

A format is a NamedTuple with the methods of `WeightFormat`. Compiled code calls them as Python does: this file tells
numba how. Each class of format compiles all products once more, so what differs between the matrices of one model is a
field of the format, or a number in the panels, and no class. Does not know any format.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

import numba.extending
from numba import types

from model_worker.cpu.simd.elements import INSIDE

# Outputs of a panel.
PANEL = 64
# Outputs of half a panel. Halves are the pieces of most products: a core takes whole panels, but of the last a half.
HALF = 32
# Halves of a panel.
HALVES = 2
# Bytes of a float32, and of a word of weights.
LANE_BYTES = 4

_overload_method: Any = numba.extending.overload_method
_OPTIONS = {"nogil": True, "error_model": "numpy", **INSIDE}


class WeightFormat(Protocol):
    """The methods of a format. Compiled code calls them, so they are written in numba's part of Python.

    An operand is an array [rows, inputs], as wide as the panels. A panel is two numbers: the address where its weights,
    or those of half of it, begin; and one that the format chooses. Indices are not checked.
    """

    def of_core(self, core: int) -> Any:
        """Return the format with a core's own buffers, where it has any."""

    def prepare(self, operand: Any) -> None:
        """Prepare this core's buffers for the rows of an operand: once before the first `multiply` by it."""

    def piece_rows(self) -> int:
        """Return the most rows that are multiplied at a time: so few that their sums stay in registers."""

    def passes(self, rows: int, whole: bool) -> int:
        """Return how often a piece of `rows` rows passes over its panel, or over half of one."""

    def panel_at(self, operand: Any, panels: int, unit: int) -> tuple[int, int]:
        """Return the panel of half number `unit`, in panels that begin at this address."""

    def layout(self, operand: Any, panel: tuple[int, int]) -> tuple[int, int, int]:
        """Return what a piece reads from the panel's address on: bytes of a header, bytes of a step, and steps."""

    def multiply(
        self, operand: Any, first: int, rows: int, panel: tuple[int, int], whole: bool, prefetching: Any, tile: Any
    ) -> None:
        """Compute tile[r] = operand[first + r] . panel for up to `piece_rows` rows; PANEL outputs, or HALF.

        Meanwhile each step prefetches as `prefetching` says: see dot_bf16.PREFETCH.
        """


def _method(kind: Any, name: str) -> FunctionType | None:
    """Return a method of the class of a named tuple, given numba's type of it, for numba to compile."""
    found = getattr(kind.instance_class, name, None)
    return found if isinstance(found, FunctionType) else None


def _compiled(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Let compiled code call this method of named tuples."""
    # Strict would compare annotations, too.
    options = {"jit_options": _OPTIONS, "strict": False}
    decorate: Callable[[Callable[..., Any]], Any] = _overload_method(types.BaseNamedTuple, name, **options)
    return decorate


@_compiled("of_core")
def _of_core(self: Any, core: Any) -> Any:
    return _method(self, "of_core")


@_compiled("prepare")
def _prepare(self: Any, operand: Any) -> Any:
    return _method(self, "prepare")


def _prepare_as_it_is(self: Any, operand: Any, order: int) -> None:
    self.prepare(operand)


@_compiled("prepare_in_order")
def _prepare_in_order(self: Any, operand: Any, order: Any) -> Any:
    """Prepare an operand whose inputs have another order in the panels: that at this address, int32, or none for 0.

    A format without this method has no panels in another order.
    """
    return _method(self, "prepare_in_order") or _prepare_as_it_is


@_compiled("piece_rows")
def _piece_rows(self: Any) -> Any:
    return _method(self, "piece_rows")


@_compiled("passes")
def _passes(self: Any, rows: Any, whole: Any) -> Any:
    return _method(self, "passes")


@_compiled("panel_at")
def _panel_at(self: Any, operand: Any, panels: Any, unit: Any) -> Any:
    return _method(self, "panel_at")


@_compiled("layout")
def _layout(self: Any, operand: Any, panel: Any) -> Any:
    return _method(self, "layout")


@_compiled("multiply")
def _multiply(
    self: Any, operand: Any, first: Any, rows: Any, panel: Any, whole: Any, prefetching: Any, tile: Any
) -> Any:
    return _method(self, "multiply")
