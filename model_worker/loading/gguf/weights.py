"""The weights of a GGUF file by the names of transformers, decoded when they are read.

Knows how llama.cpp's converters change weights, and undoes that on rows of blocks where it can. Does not know models.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight, JoinedExperts
from model_worker.host_memory import give_back
from model_worker.loading.gguf.names import Change, Source
from shared.gguf.blocks import OUTPUTS_AT_A_TIME
from shared.gguf.code_blocks import codes_of, has_codes
from shared.gguf.file import GgufFile, Matrix
from shared.gguf.format import damaged
from shared.weight_codes import Codes

# Numbers from which on decoding is worth several threads.
_WORTH_THREADS = 1 << 20


class GgufWeight(EncodedWeight):
    """A weight of rows of blocks, in a file that is mapped. `matrix.raw` gives the blocks as they are in the file."""

    def __init__(self, matrix: Matrix, shape: tuple[int, ...] | None = None) -> None:
        """Take a matrix as it is, or as several of them, [experts, outputs, inputs]."""
        self.matrix = matrix
        self.shape = shape or matrix.shape

    def rows(self, first: int, last: int) -> Tensor:
        per_row = self.matrix.shape[0] // self.shape[0]
        values = _decode(self.matrix, first * per_row, last * per_row)
        self._let_go(last * per_row)
        return torch.from_numpy(values).reshape(last - first, *self.shape[1:])

    @property
    def codes(self) -> Callable[[int, int], Codes] | None:
        kind = self.matrix.kind
        if len(self.shape) != 2 or not has_codes(kind):
            return None

        def read(first: int, last: int) -> Codes:
            codes = codes_of(kind, np.ascontiguousarray(self.matrix.raw(first, last)))
            self._let_go(last)
            return codes

        return read

    def _let_go(self, last: int) -> None:
        """Give the pages of the file back that hold the rows up to this one: they have been read, most of them once."""
        give_back([self.matrix.rows[:last]])

    @property
    def experts(self) -> list[list[GgufWeight]]:
        return [[self.of_expert(number)] for number in range(self.shape[0])] if len(self.shape) > 2 else []

    def of_expert(self, number: int) -> GgufWeight:
        """Return the matrix of an expert."""
        outputs = self.shape[1]
        return GgufWeight(self.matrix.part(number * outputs, (number + 1) * outputs))


class TurningExperts(EncodedWeight):
    """The weights [experts, in, out] of gpt-oss: of a tensor [experts, out, in], or of two whose outputs take turns."""

    def __init__(self, tensors: list[GgufWeight]) -> None:
        self._tensors = tensors
        experts, outputs, inputs = tensors[0].shape
        self.shape = (experts, inputs, outputs * len(tensors))

    def rows(self, first: int, last: int) -> Tensor:
        by_turns = torch.stack([tensor.rows(first, last) for tensor in self._tensors], 2)
        return by_turns.flatten(1, 2).transpose(1, 2)

    @property
    def experts(self) -> list[list[GgufWeight]]:
        return [[tensor.of_expert(number) for tensor in self._tensors] for number in range(self.shape[0])]

    @property
    def takes_turns(self) -> bool:
        return len(self._tensors) > 1


@dataclass(frozen=True, eq=False)
class Vector:
    """A weight that is not kept in blocks, such as a norm's or a bias, of this shape."""

    values: NDArray[np.float32]
    shape: tuple[int, ...]

    def decoded(self, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(self.values).reshape(self.shape).to(dtype)


def read_weight(
    file: GgufFile, source: Source, shape: tuple[int, ...], heads: int, kv_heads: int
) -> EncodedWeight | Vector:
    """Return the weight of this shape. GgufError for a tensor that is missing or has another shape."""
    tensors = [file.tensor(name) for name in source.names]
    wanted = shape
    if source.change in (Change.JOIN, Change.TAKE_TURNS):
        wanted = (shape[0], shape[1] // len(tensors), *shape[2:])
    elif source.change == Change.EXPERTS:
        wanted = (shape[0], shape[2] // len(tensors), shape[1])
    for tensor in tensors:
        # One row of a matrix may be stored as a vector.
        if tensor.shape != wanted and (1, *tensor.shape) != wanted:
            raise damaged(
                file.path, f"tensor {tensor.name} is {list(tensor.shape)}, and by the metadata it is {list(wanted)}"
            )
    order = None
    if source.change in (Change.REORDER_QUERY, Change.REORDER_KEY):
        order = _stored_rows(shape[0], heads if source.change == Change.REORDER_QUERY else kv_heads)
    if len(tensors[0].shape) == 1:
        values = tensors[0].values()
        if order is not None:
            values = values[order]
        return Vector(values - 1 if source.change == Change.LESS_ONE else values, shape)
    if source.change == Change.TAKE_TURNS:
        return Vector(np.stack([tensor.values() for tensor in tensors], 2).reshape(shape), shape)
    weights = [GgufWeight(tensor.matrix, wanted) for tensor in tensors]
    if source.change == Change.EXPERTS:
        return TurningExperts(weights)
    if source.change == Change.JOIN:
        each = [[weight.of_expert(number) for weight in weights] for number in range(shape[0])]
        return JoinedExperts(each)
    return weights[0] if order is None else GgufWeight(weights[0].matrix.in_order(order))


def _stored_rows(outputs: int, heads: int) -> NDArray[np.int64]:
    """Return the stored row of each output of a query or key projection.

    transformers rotates output i of a head with output i + half; llama.cpp rotates neighbours, so files have them side
    by side.
    """
    half = outputs // heads // 2
    rows = np.arange(outputs, dtype=np.int64).reshape(heads, half, 2)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def _decode(matrix: Matrix, first: int, last: int) -> NDArray[np.float32]:
    """Decode rows a few at a time, so that what is made on the way stays in a cache; many rows in several threads."""
    values = np.empty((last - first, matrix.shape[1]), np.float32)
    threads = torch.get_num_threads() if values.size >= _WORTH_THREADS else 1

    def fill(part: int) -> None:
        """Decode every `threads`-th piece."""
        for start in range(first + part * OUTPUTS_AT_A_TIME, last, threads * OUTPUTS_AT_A_TIME):
            stop = min(start + OUTPUTS_AT_A_TIME, last)
            values[start - first : stop - first] = matrix.decode(start, stop)

    if threads == 1:
        fill(0)
        return values
    with ThreadPoolExecutor(threads, "decode") as pool:
        for _ in pool.map(fill, range(threads)):
            pass
    return values
