"""What a pass over an encoder's layers is given: weights, buffers, places and texts. Knows no arithmetic."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Q, K, V, OUT_WEIGHT, UP_WEIGHT, DOWN_WEIGHT, GATE_WEIGHT, WEIGHTS = range(8)
NORM_WEIGHT, NORM_BIAS, LAST_NORM_WEIGHT, LAST_NORM_BIAS, NORMS = range(5)


class EncoderWeights(NamedTuple):
    """The weights of the layers. Arrays begin with the layer."""

    panels: NDArray[np.int64]  # [L, WEIGHTS] addresses of packed weights; 0 for no gate
    qkv_biases: NDArray[np.float32]  # [L, 3 * hidden]
    out_biases: NDArray[np.float32]  # [L, hidden]
    up_biases: NDArray[np.float32]  # [L, 2, inner]: the gate's, and those of UP
    down_biases: NDArray[np.float32]  # [L, hidden]
    norms: NDArray[np.float32]  # [L, NORMS, hidden]
    # What operands are multiplied by, beside what the model computes: their weights were divided by it.
    hidden_scales: NDArray[np.float32]  # [L, 2, hidden]: before UP, and before the QKV of the next layer
    value_scales: NDArray[np.float32]  # [L, hidden] before the V of the next layer, if it has its own; else [0, hidden]
    heads_scales: NDArray[np.float32]  # [L, hidden]
    inner_scales: NDArray[np.float32]  # [L, inner]
    epsilon: np.float32
    heads: int
    scale: np.float32
    activation: int  # a code of simd/activations.py
    norms_first: bool  # whether norms are of what a layer reads, and the residual stays as it is until the last one
    ends: bool  # whether the last of these layers is the model's last one
    windows: NDArray[np.int64]  # [L]: tokens that are less than so many apart see each other; 0 for all
    angles: NDArray[np.int64]  # [L]: the layer's table of `Places`


def of_layer(weights: EncoderWeights, number: int) -> EncoderWeights:
    """Return the weights of one layer."""
    fields = weights._asdict().items()
    arrays: dict[str, Any] = {
        name: value[number : number + 1] for name, value in fields if isinstance(value, np.ndarray)
    }
    return weights._replace(**arrays, ends=number == len(weights.panels) - 1)


class EncoderBuffers(NamedTuple):
    """Buffers for T tokens, or for B that are dealt with at a time. Operands are as wide as panels have steps."""

    hidden: NDArray[Any]  # operand [T, >= hidden]
    of_values: NDArray[Any]  # the same for V: `hidden` itself, unless V has scales of its own
    qkv: NDArray[np.float32]  # [T, 3 * hidden]
    heads: NDArray[Any]  # operand [T, >= hidden]
    inner: NDArray[Any]  # operand [B, >= inner]


class Places(NamedTuple):
    """What attention makes of P places, or empty arrays: see Nearness."""

    cos: NDArray[np.float32]  # [tables, P, head_dim / 2]
    sin: NDArray[np.float32]
    biases: NDArray[np.float32]  # [heads, 2 P - 1]


class EncoderWork(NamedTuple):
    """The arguments of a pass."""

    x: NDArray[np.float32]  # [T, hidden]: the embeddings, and in the end the last hidden states
    texts: NDArray[np.int64]  # [n + 1]: where each text begins, and all end
    seen: NDArray[np.int64]  # [n]: the tokens of each text that all its tokens see: the first ones
    longest: int
    weights: EncoderWeights
    buffers: EncoderBuffers
    places: Places
    like: NDArray[Any]  # any array of the type of attention's operands
