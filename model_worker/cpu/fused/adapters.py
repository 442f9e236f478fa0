"""Adapters in the form in which the fused stack reads them, and the tables of those that a pass uses.

The linear layers of one input share one A: their ranks lie side by side, so that the input is read once. Each has a B
of its own. Knows projections and panels. Does not know files, nor how the products are computed (gemm/low_rank.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from model_worker.adapters.fitting import AdaptedEmbedding, AdaptedLinear, Adapter
from model_worker.adapters.hooks import token_adapters
from model_worker.cpu.fused.layer import DOWN, GATE, UP, Adapters, K, O, Q, V
from model_worker.cpu.gemm.low_rank import (
    BLOCKS,
    COUNT,
    EMBEDDING_COLUMNS,
    EMBEDDING_PANELS,
    GAINS,
    INPUT_COLUMNS,
    LINE_BYTES,
    OUTPUT_COLUMNS,
    PANELS,
    STEPS,
    VECTORS,
)
from model_worker.cpu.gemm.weight_format import LANE_BYTES, PANEL
from model_worker.cpu.huge_pages import keep_in_huge_pages
from model_worker.cpu.simd.dot_low_rank import RANKS

if TYPE_CHECKING:
    from model_worker.batch import ForwardBatch
    from model_worker.cpu.fused.pattern import DecoderWeights, Projection

# The projections that read one operand, in the order of layer.py's RANKS_PARTS.
_READERS = ((Q, K, V), (O,), (GATE, UP), (DOWN,))
_PROJECTIONS = 7
# Words in a line of memory: each part of an adapter begins with one.
_LINE = LINE_BYTES // LANE_BYTES
_NONE: NDArray[np.int64] = np.empty(0, np.int64)


class StackAdapter(NamedTuple):
    """An adapter as the stack reads it."""

    memory: NDArray[np.uint32]  # owns what the tables point to
    inputs: NDArray[np.int64]  # [L + 1, 4, INPUT_COLUMNS]
    outputs: NDArray[np.int64]  # [L + 1, 7, OUTPUT_COLUMNS]
    embedding: NDArray[np.int64]  # [EMBEDDING_COLUMNS]

    @property
    def has_head(self) -> bool:
        return bool(self.inputs[-1, 0, COUNT])

    @property
    def has_embedding(self) -> bool:
        return bool(self.embedding.any())


class PassAdapters(NamedTuple):
    """The adapters of a pass, for compiled code, and what must live as long as it runs."""

    arrays: Adapters
    held: tuple[StackAdapter, ...]


class _Memory:
    """Parts of an adapter on their way into one piece of memory."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.uint32]] = []
        self._words = 0

    def add(self, words: NDArray[np.uint32]) -> int:
        """Add a part. Returns where it will lie, in bytes from the beginning."""
        place = self._words * LANE_BYTES
        padding = -words.size % _LINE
        self._parts += [words.reshape(-1), np.zeros(padding, np.uint32)]
        self._words += words.size + padding
        return place

    def join(self) -> NDArray[np.uint32]:
        """Join the parts. The memory begins with a line."""
        memory = np.empty(self._words + _LINE, np.uint32)
        first = -memory.ctypes.data // LANE_BYTES % _LINE
        joined = memory[first : first + self._words]
        if self._parts:
            # An adapter may change the image encoder alone.
            np.concatenate(self._parts, out=joined)
        keep_in_huge_pages([joined], written=True)
        return joined


class StackAdapters:
    """The adapters of a stack, by handle."""

    def __init__(self, decoder: DecoderWeights, widths: tuple[int, int, int], element: Any) -> None:
        """`widths` are the operands' input features, with padding: of the hidden state, the heads, the MLP's inside."""
        hidden, heads, inner = widths
        self._layers = [*decoder.projections, [decoder.head]]
        self._widths = (hidden, heads, hidden, inner)
        self._dtype = torch.bfloat16 if element == np.uint16 else torch.float32
        self._like: NDArray[Any] = np.empty(1, element)
        self._adapters: dict[int, StackAdapter] = {}
        layers = len(self._layers)
        # Of passes without adapters.
        self._nothing = PassAdapters(
            Adapters(
                slots=_NONE,
                inputs=np.zeros((0, layers, len(_READERS), INPUT_COLUMNS), np.int64),
                outputs=np.zeros((0, layers, _PROJECTIONS, OUTPUT_COLUMNS), np.int64),
                blocks=np.zeros(len(_READERS) + 1, np.int64),
                ranks=np.empty((0, 0), np.float32),
                like=self._like,
                embedding_slots=_NONE,
                embeddings=np.zeros((0, EMBEDDING_COLUMNS), np.int64),
                head_slots=_NONE,
                head_ranks=np.empty((0, 0), np.float32),
            ),
            (),
        )
        # The tables of the last pass that had adapters: the next one has most likely the same.
        self._last: tuple[tuple[int, ...], PassAdapters] = ((), self._nothing)

    def add(self, handle: int, adapter: Adapter) -> int:
        """Keep an adapter. Returns its bytes. May run beside passes that do not use it."""
        packed = self._packed(adapter)
        self._adapters[handle] = packed
        return packed.memory.nbytes + packed.inputs.nbytes + packed.outputs.nbytes

    def drop(self, handle: int) -> None:
        """Forget an adapter. Passes that use it keep it until they end."""
        self._adapters.pop(handle, None)
        self._last = ((), self._nothing)

    def of_pass(self, batch: ForwardBatch, most_rows: int) -> PassAdapters:
        """Return the adapters of a batch, with room for the products of `most_rows` tokens at a time."""
        if batch.adapters is None or not batch.adapters.any():
            return self._nothing
        tokens = token_adapters(batch)
        handles = tuple(np.unique(tokens[tokens != 0]).tolist())
        if handles != self._last[0]:
            self._last = handles, self._tables([self._adapters[handle] for handle in handles])
        tables = self._last[1]
        arrays = tables.arrays
        slots = np.where(tokens == 0, -1, np.searchsorted(handles, tokens))
        head_slots = _NONE
        if any(adapter.has_head for adapter in tables.held):
            head_slots = slots[batch.logit_positions.numpy()]
        embedding_slots = _NONE
        if any(adapter.has_embedding for adapter in tables.held):
            embedding_slots = slots.copy()
            if batch.embeddings is not None:
                # Tokens with vectors of their own.
                embedding_slots[batch.embeddings[0].numpy()] = -1
        width = RANKS * int(arrays.blocks[: len(_READERS)].max())
        head_width = RANKS * int(arrays.blocks[-1])
        return tables._replace(
            arrays=arrays._replace(
                slots=slots,
                ranks=np.empty((min(most_rows, len(slots)), width), np.float32),
                embedding_slots=embedding_slots,
                head_slots=head_slots,
                head_ranks=np.empty((len(head_slots), head_width), np.float32),
            )
        )

    def _tables(self, adapters: list[StackAdapter]) -> PassAdapters:
        inputs = np.stack([adapter.inputs for adapter in adapters])
        counts = inputs[..., COUNT]
        blocks = np.append(counts[:, :-1].max((0, 1)), counts[:, -1, 0].max())
        outputs = np.stack([adapter.outputs for adapter in adapters])
        embeddings = np.stack([adapter.embedding for adapter in adapters])
        arrays = self._nothing.arrays._replace(inputs=inputs, outputs=outputs, blocks=blocks, embeddings=embeddings)
        return PassAdapters(arrays, tuple(adapters))

    def _packed(self, adapter: Adapter) -> StackAdapter:
        """Return an adapter in this form."""
        memory = _Memory()
        inputs = np.zeros((len(self._layers), len(_READERS), INPUT_COLUMNS), np.int64)
        outputs = np.zeros((len(self._layers), _PROJECTIONS, OUTPUT_COLUMNS), np.int64)
        for layer, projections in enumerate(self._layers):
            for operand, readers in enumerate(_READERS):
                if readers[0] < len(projections):
                    used = [reader for reader in readers if reader < len(projections)]
                    width = self._widths[operand]
                    inputs[layer, operand] = self._pack_readers(
                        memory, adapter.linears, {reader: projections[reader] for reader in used}, width, outputs[layer]
                    )
        embedding = np.zeros(EMBEDDING_COLUMNS, np.int64)
        if adapter.embedding is not None:
            embedding[:] = self._pack_embedding(memory, adapter.embedding)
        joined = memory.join()
        begin = joined.ctypes.data
        inputs[..., BLOCKS][inputs[..., COUNT] > 0] += begin
        used_outputs = outputs[..., STEPS] > 0
        outputs[..., PANELS][used_outputs] += begin
        outputs[..., GAINS][outputs[..., GAINS] >= 0] += begin
        outputs[..., GAINS][outputs[..., GAINS] < 0] = 0
        outputs[~used_outputs] = 0
        if adapter.embedding is not None:
            embedding[[VECTORS, EMBEDDING_PANELS]] += begin
        return StackAdapter(joined, inputs, outputs, embedding)

    def _pack_embedding(self, memory: _Memory, embedding: AdaptedEmbedding) -> tuple[int, int, int]:
        """Pack what changes the embedding. Returns a row of its table, with places instead of addresses."""
        rank = embedding.a.shape[1]
        vectors = functional.pad(embedding.a, (0, rank % 2)).to(self._dtype).contiguous()
        b = functional.pad(embedding.b, (0, rank % 2, 0, -len(embedding.b) % PANEL))
        panels = _words(b.reshape(-1, PANEL, b.shape[1]), self._dtype)
        header = np.zeros(_LINE, np.uint32)
        header[:1].view(np.float32)[0] = embedding.scale
        numbers = vectors.view(torch.int32).numpy().view(np.uint32)
        return memory.add(np.concatenate([header, numbers.reshape(-1)])), memory.add(panels), panels.shape[1]

    def _pack_readers(
        self,
        memory: _Memory,
        linears: dict[nn.Module, AdaptedLinear],
        readers: dict[int, Projection],
        width: int,
        outputs: NDArray[np.int64],
    ) -> tuple[int, int]:
        """Pack what adapts the projections of one operand, and fill in their `outputs` [7, OUTPUT_COLUMNS].

        Returns the place of A's blocks, and their number. Projections of one module share its ranks.
        """
        columns: dict[nn.Module, int] = {}
        rows: list[Tensor] = []
        scales: list[Tensor] = []
        offsets: list[Tensor] = []
        for number, projection in readers.items():
            linear = linears.get(projection.linear)
            if linear is None:
                continue
            if projection.linear not in columns:
                columns[projection.linear] = sum(len(scale) for scale in scales)
                a, scale, offset = _rows_of_a(linear)
                rows.append(functional.pad(a, (0, width - a.shape[1])))
                scales.append(scale)
                offsets.append(offset)
            column = columns[projection.linear]
            outputs[number] = self._pack_outputs(memory, linear, projection, column)
        if not rows:
            return 0, 0
        padding = -sum(len(scale) for scale in scales) % RANKS
        a = functional.pad(torch.cat(rows), (0, 0, 0, padding)).reshape(-1, RANKS, width)
        header = torch.stack(
            [functional.pad(torch.cat(values), (0, padding)).reshape(-1, RANKS) for values in (scales, offsets)], 1
        )
        # [block, header and steps, RANKS]
        words = np.concatenate([header.numpy().view(np.uint32), _words(a, self._dtype)], 1)
        return memory.add(words), len(words)

    def _pack_outputs(
        self, memory: _Memory, linear: AdaptedLinear, projection: Projection, column: int
    ) -> tuple[int, int, int, int]:
        """Pack B for a projection. Returns a row of the outputs' table, with places instead of addresses."""
        some = slice(projection.first, projection.first + projection.width)
        padding = -projection.width % PANEL
        b = functional.pad(_columns_of_b(linear)[some], (0, 0, 0, padding))
        panels = _words(b.reshape(-1, PANEL, b.shape[1]), self._dtype)
        gains = -1
        if linear.gain is not None:
            gains = memory.add(functional.pad(linear.gain[some], (0, padding)).numpy().view(np.uint32))
        return memory.add(panels), column, panels.shape[1], gains


def _ranks_of(linear: AdaptedLinear) -> int:
    """Return the columns that a module's ranks take: a bias is one more, and words hold two."""
    ranks = len(linear.a) + (linear.bias is not None)
    return ranks + ranks % 2


def _rows_of_a(linear: AdaptedLinear) -> tuple[Tensor, Tensor, Tensor]:
    """Return A, its scales and its offsets. The rank of a bias is 1, whatever the input."""
    missing = _ranks_of(linear) - len(linear.a)
    a = functional.pad(linear.a, (0, 0, 0, missing))
    scales = torch.full((len(a),), linear.scale)
    offsets = torch.zeros(len(a))
    if linear.bias is not None:
        offsets[len(linear.a)] = 1.0
    return a, scales, offsets


def _columns_of_b(linear: AdaptedLinear) -> Tensor:
    """Return B with its bias as one more rank. Gains multiply the whole tile, and so must not change the bias."""
    columns = [linear.b]
    if linear.bias is not None:
        columns.append((linear.bias if linear.gain is None else linear.bias / linear.gain)[:, None])
    b = torch.cat(columns, 1)
    return functional.pad(b, (0, _ranks_of(linear) - b.shape[1]))


def _words(rows: Tensor, dtype: torch.dtype) -> NDArray[np.uint32]:
    """Return [panel, outputs, inputs] as words [panel, step, outputs], each with as many inputs as it holds."""
    words = rows.to(dtype).contiguous().view(torch.int32)
    array: NDArray[np.uint32] = words.transpose(1, 2).contiguous().numpy().view(np.uint32)
    return array
