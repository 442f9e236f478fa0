"""Random numbers that are a function of (seed, position, token id) and of nothing else.

A counter-based generator: there is no state to carry, save or race for, so a request draws the same tokens alone or
in a crowd, after preemption, on another worker and on another device. `row_keys` mixes (seed, position) to a 64-bit
key; the noise of a token is the splitmix64 sequence that starts at the key, read at index token + 1. The uniform is
made of the top 52 bits plus one half, which a float64 holds exactly, so the numpy, numba and torch versions agree bit
for bit and 0 and 1 never occur.

Knows integers only. It does not know logits or rows of a table.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
SEED_OFFSET = 0xD1B54A32D192ED03
POSITION_STEP = 0x8CB92BA72F3D8DD7

_STEP = 2.0**-52
# numba takes the type of a constant from its numpy type; a plain int beside a uint64 would turn the sum into a float.
_U_GOLDEN = np.uint64(GOLDEN)
_U_MIX_1 = np.uint64(MIX_1)
_U_MIX_2 = np.uint64(MIX_2)
_U_30 = np.uint64(30)
_U_27 = np.uint64(27)
_U_31 = np.uint64(31)
_U_12 = np.uint64(12)
_U_1 = np.uint64(1)


def row_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return one key for each (seed, position); positions of one seed never share a key (every step is a bijection)."""
    mixed = _mix(np.atleast_1d(seeds).astype(np.uint64) + np.uint64(SEED_OFFSET))
    return _mix(mixed ^ (np.atleast_1d(positions).astype(np.uint64) * np.uint64(POSITION_STEP)))


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> _U_30)) * _U_MIX_1
    value = (value ^ (value >> _U_27)) * _U_MIX_2
    return value ^ (value >> _U_31)


@numba.njit(cache=True, nogil=True)
def uniform_at(key: np.uint64, token: int) -> float:
    """Return the uniform in (0, 1) of one token: the scalar form, for the CPU kernel."""
    value = key + (np.uint64(token) + _U_1) * _U_GOLDEN
    value = (value ^ (value >> _U_30)) * _U_MIX_1
    value = (value ^ (value >> _U_27)) * _U_MIX_2
    value = value ^ (value >> _U_31)
    return (np.float64(value >> _U_12) + 0.5) * _STEP


@numba.njit(cache=True, nogil=True)
def uniforms_cpu(keys: NDArray[np.uint64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the uniforms of pairs (key, token) on the CPU."""
    out = np.empty(keys.shape[0], np.float64)
    for i in range(keys.shape[0]):
        out[i] = uniform_at(keys[i], tokens[i])
    return out


def uniforms(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the uniforms of pairs (key, token), element by element with broadcasting, on the tensors' device.

    Keys are the uint64 keys seen as int64: torch multiplies int64 modulo 2**64, which is all that the mix needs.
    """
    value = keys + (tokens + 1) * _signed(GOLDEN)
    value = (value ^ _shift_right(value, 30)) * _signed(MIX_1)
    value = (value ^ _shift_right(value, 27)) * _signed(MIX_2)
    value = value ^ _shift_right(value, 31)
    return (_shift_right(value, 12).to(torch.float64) + 0.5) * _STEP


def gumbels(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise of pairs (key, token); argmax of log-weight + noise draws in proportion to the
    weights."""
    return -torch.log(-torch.log(uniforms(keys, tokens)))


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    # `>>` on int64 copies the sign bit; the mask makes the shift logical.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
