"""Activations of encoders without a call, so that loops over them become vector instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from model_worker.cpu.simd.elements import INSIDE, MATH, exp

# The codes of activations.
GELU, GELU_TANH, SILU = range(3)

_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_ROOT_OF_HALF = np.float32(0.7071067811865476)
# Abramowitz and Stegun 7.1.26: the complement of erf to 1.5e-7, as exp(-z^2) times a polynomial in 1 / (1 + _P z).
_P = np.float32(0.3275911)
_A1 = np.float32(0.254829592)
_A2 = np.float32(-0.284496736)
_A3 = np.float32(1.421413741)
_A4 = np.float32(-1.453152027)
_A5 = np.float32(1.061405429)
_SCALE = np.float32(0.7978845608028654)
_CUBIC = np.float32(0.044715)


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def gelu(x: Any) -> Any:
    """Compute x times the normal distribution's share below x, to float32 precision of |x|."""
    size = abs(x)
    z = size * _ROOT_OF_HALF
    t = _ONE / (_ONE + _P * z)
    tail = ((((_A5 * t + _A4) * t + _A3) * t + _A2) * t + _A1) * t * exp(-z * z)
    outside = _HALF * size * tail
    return x - outside if x > np.float32(0.0) else -outside


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def gelu_tanh(x: Any) -> Any:
    """Compute GELU's approximation by a tanh, which some models were trained with."""
    inside = _SCALE * (x + _CUBIC * x * x * x)
    return x / (_ONE + exp(-_TWO * inside))


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def activate(values: Any, bias: Any, activation: int) -> None:
    """Add a bias to as many values, and activate them in place."""
    if activation == GELU:
        for lane in range(len(bias)):
            values[lane] = gelu(values[lane] + bias[lane])
    elif activation == GELU_TANH:
        for lane in range(len(bias)):
            values[lane] = gelu_tanh(values[lane] + bias[lane])
    else:
        for lane in range(len(bias)):
            x = values[lane] + bias[lane]
            values[lane] = x / (_ONE + exp(-x))
