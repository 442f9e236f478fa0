"""Equality of dataclasses that hold arrays: numpy's own `==` has no single truth value."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


class EqualByValue:
    """Mixin for `@dataclass(eq=False)`: equal when of one class with equal fields; arrays by dtype, shape, content."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        names = (f.name for f in dataclasses.fields(self))  # type: ignore[arg-type]
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return False
    if type(a) is dict and type(b) is dict:
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)
