"""The 4 bits of bitsandbytes, nf4 and fp4: codes of a table, the first high, times the greatest of each block.

Blocks count through the whole matrix. Their greatest values may be quantized themselves ("nested").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.cpu.simd.dot_codes import GROUP_INPUTS
from model_worker.loading.quantized.bits import nibbles
from model_worker.loading.quantized.scheme import whole_number
from model_worker.loading.quantized.stored_weight import StoredWeight
from model_worker.loading.stored import Pool, Stored
from shared.json_files import parse_json
from shared.weight_codes import Codes, Grouped

_STATE = ".quant_state.bitsandbytes__"
_BITS = 4
# Values that these may stand for.
_TABLE = 1 << _BITS
# Bytes of the numbers that codes may be stored as.
_BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}


class BlockWeight(StoredWeight):
    """A weight of a table of 16, and the greatest value of each block of `block` numbers."""

    def __init__(self, codes: Stored, shape: tuple[int, ...], table: Tensor, greatest: Tensor, block: int) -> None:
        self._codes = codes
        self._table = table.float()
        self._greatest = greatest
        self._block = block
        self.shape = shape

    @property
    def step(self) -> int:
        # A piece must begin with a byte.
        return super().step * 2

    def rows(self, first: int, last: int) -> Tensor:
        width = self.shape[1]
        start = first * width
        stop = last * width
        values = self._table[self._places(start, stop)] * self._greatest[torch.arange(start, stop) // self._block]
        return values.view(last - first, width)

    @property
    def codes(self) -> Callable[[int, int], Codes] | None:
        # A row is whole blocks, each of them whole groups of panels.
        fitting = self.shape[1] % self._block == 0 and self._block % GROUP_INPUTS == 0
        return self._codes_of if fitting else None

    def _codes_of(self, first: int, last: int) -> Codes:
        width = self.shape[1]
        blocks = width // self._block
        greatest = self._greatest[first * blocks : last * blocks].view(last - first, blocks)
        codes = self._places(first * width, last * width).to(torch.uint8).view(last - first, width)
        return Codes(codes.numpy(), _BITS, Grouped(greatest.numpy()), 0, table=self._table.numpy())

    def _places(self, start: int, stop: int) -> Tensor:
        """Return the codes of numbers from `start` up to `stop`."""
        data = self._codes[start // 2 : -(-stop // 2)] if self._codes.dtype == "U8" else self._bytes(start, stop)
        return nibbles(data.flatten(), high_first=True)[: stop - start]

    def _bytes(self, start: int, stop: int) -> Tensor:
        """Read codes that are stored as numbers of another type."""
        return self._codes.read().contiguous().view(torch.uint8).flatten()[start // 2 : -(-stop // 2)]


def take_4bit(pool: Pool) -> dict[str, EncodedWeight]:
    """Take the weights of this format. ValueError says what in them cannot be read."""
    found: dict[str, EncodedWeight] = {}
    for name in pool:
        target, mark, kind = name.partition(_STATE)
        if not mark:
            continue
        if kind not in ("nf4", "fp4") or target not in pool:
            raise ValueError(f"{name} is a quantized weight of a kind that cannot be read here; nf4 and fp4 can")
        state = _state(pool.take(name))
        shape = tuple(whole_number(size, "shape", name) for size in state["shape"])
        codes = pool.take(target)
        if len(shape) != 2 or min(shape) < 1 or (shape[1] % 2 and shape[0] > 1):
            raise ValueError(f"{name} says shape {list(shape)}; only matrices with an even number of inputs are read")
        greatest = _greatest(pool, target, state)
        block = whole_number(state["blocksize"], "blocksize", name)
        count = shape[0] * shape[1]
        held = math.prod(codes.shape) * _BYTES[codes.dtype]
        if block < 1 or greatest.dim() != 1 or len(greatest) * block < count or held * 2 < count:
            raise ValueError(f"{target} has {held} bytes and {greatest.numel()} blocks, too few for {list(shape)}")
        table = pool.take(f"{target}.quant_map").read()
        if table.shape != (_TABLE,):
            raise ValueError(f"{target}.quant_map has shape {list(table.shape)} and should have {[_TABLE]}")
        found[target] = BlockWeight(codes, shape, table, greatest, block)
    return found


def _state(stored: Stored) -> dict[str, Any]:
    """Read what a weight's tensor of JSON says. ValueError names one that is none, or that lacks a field."""
    try:
        state = parse_json(bytes(stored.read().tolist()))
    except (ValueError, TypeError):
        state = None
    if not isinstance(state, dict) or not isinstance(state.get("shape"), list) or "blocksize" not in state:
        raise ValueError(f"{stored.name} is no JSON object with shape and blocksize: download the file anew")
    return state


def _greatest(pool: Pool, target: str, state: dict[str, Any]) -> Tensor:
    """Return the greatest value of each block."""
    stored = pool.take(f"{target}.absmax").read()
    scales = pool.take_if(f"{target}.nested_absmax")
    if scales is None and not stored.is_floating_point():
        raise ValueError(
            f"{target}.absmax has codes ({stored.dtype}), and no {target}.nested_absmax says what they stand for: "
            "download the files anew"
        )
    if scales is None:
        return stored.float()
    table = pool.take(f"{target}.nested_quant_map").read().float()
    blocks = torch.arange(len(stored)) // int(state["nested_blocksize"])
    return table[stored.int()] * scales.read().float()[blocks] + float(state["nested_offset"])
