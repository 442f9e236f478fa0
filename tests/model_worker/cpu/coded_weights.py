"""Random weights in codes, of every kind that panels hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.cpu.gemm.coded_linear import CodedLinear
from shared.gguf.code_blocks import codes_of, has_codes
from shared.gguf.format import TYPES
from shared.weight_codes import E4M3, Codes, Grouped

# The types of blocks that are codes.
BLOCK_TYPES = {kind.name: kind for kind in TYPES.values() if has_codes(kind)}
# Bytes of a block that are float16: a random one would not always be finite.
_FLOATS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}


def random_blocks(rng: np.random.Generator, name: str, outputs: int, blocks: int) -> NDArray[np.uint8]:
    """Rows of blocks of one of ggml's types, with values of about 1."""
    kind = BLOCK_TYPES[name]
    rows = rng.integers(0, 256, (outputs, blocks, kind.num_bytes), dtype=np.uint8)
    size = 2 ** -max(3, kind.num_bytes * 8 // kind.inputs) / (32 if kind.inputs == 256 else 1)
    for place in _FLOATS.get(name, (0,)):
        scales = rng.standard_normal((outputs, blocks, 1)) * size
        rows[..., place : place + 2] = scales.astype("<f2").view(np.uint8)
    if name == "MXFP4":
        rows[..., 0] = rng.integers(120, 128, (outputs, blocks))
    return rows.reshape(outputs, -1)


def _of_blocks(name: str) -> Callable[[np.random.Generator, int, int], Codes]:
    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Codes:
        return codes_of(BLOCK_TYPES[name], random_blocks(rng, name, outputs, inputs // BLOCK_TYPES[name].inputs))

    return make


def _of_groups(
    bits: int, group: int, with_zeros: bool, dtype: type
) -> Callable[[np.random.Generator, int, int], Codes]:
    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Codes:
        groups = inputs // group if group else 1
        codes = rng.integers(0, 2**bits, (outputs, inputs), dtype=np.uint8)
        scales = (rng.random((outputs, groups)) / 2**bits).astype(dtype)
        zeros = rng.integers(0, 2**bits, (outputs, groups), dtype=np.uint8) if with_zeros else 2 ** (bits - 1)
        return Codes(codes, bits, Grouped(scales), zeros)

    return make


def _of_fp8(group: int) -> Callable[[np.random.Generator, int, int], Codes]:
    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Codes:
        codes = rng.integers(0, 256, (outputs, inputs), dtype=np.uint8)
        # These two are no numbers.
        codes[codes & 0x7F == 0x7F] = 0
        scales = rng.random((outputs, inputs // group if group else 1)) / 128
        return Codes(codes, 8, Grouped(scales.astype(np.float32)), 0, table=E4M3)

    return make


def _nf4(rng: np.random.Generator, outputs: int, inputs: int) -> Codes:
    codes = rng.integers(0, 16, (outputs, inputs), dtype=np.uint8)
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    return Codes(codes, 4, Grouped(rng.random((outputs, inputs // 64)).astype(np.float32)), 0, table=table)


# What makes the codes of a weight [outputs, inputs]. Inputs are multiples of 256.
KINDS: dict[str, Callable[[np.random.Generator, int, int], Codes]] = {
    **{name: _of_blocks(name) for name in BLOCK_TYPES},
    "GPTQ 4 bits": _of_groups(4, 128, True, np.float16),
    "GPTQ 3 bits": _of_groups(3, 32, True, np.float16),
    "GPTQ 8 bits": _of_groups(8, 64, True, np.float16),
    "bfloat16 scales": _of_groups(4, 64, False, np.float32),
    "groups of 16": _of_groups(4, 16, True, np.float32),
    "whole rows": _of_groups(8, 0, False, np.float32),
    "FP8": _of_fp8(0),
    "FP8 of blocks": _of_fp8(128),
    "NF4": _nf4,
}


def some(codes: Codes, first: int, end: int) -> Codes:
    """Some outputs of a weight, as a reader gives them."""

    def part(group: Grouped) -> Grouped:
        return Grouped(group.base[first:end], None if group.steps is None else group.steps[first:end])

    return codes._replace(
        codes=codes.codes[first:end],
        scales=part(codes.scales),
        zeros=codes.zeros if isinstance(codes.zeros, int) else codes.zeros[first:end],
        minimums=None if codes.minimums is None else part(codes.minimums),
    )


def coded(codes: Codes, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.float32) -> CodedLinear:
    """A linear layer with this weight."""
    shape = codes.codes.shape[0], codes.codes.shape[1]
    return CodedLinear(shape, bias, dtype, lambda first, end: some(codes, first, end))
