"""Steps with prompts in them as recorded graphs: one for each of a few numbers of tokens.

Launched one by one, the kernels of such a step take several times as long as they run. A recorded step has a fixed
number of tokens, sequences and logits. Tokens that a step lacks are one more sequence, whose keys lie in a block of no
other; sequences that it lacks have no tokens; logits that it lacks are those of its first token, and are not read. Only
for attention whose launches depend on no length. Knows batches; it does not know models or sampling.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.cuda.graphs import Forward, Recorder

_LEAST_TOKENS = 16


def token_sizes(max_tokens: int) -> list[int]:
    """Return 16, 32, 64, then two sizes between each power of two and the next, and `max_tokens` itself."""
    sizes, size = [], _LEAST_TOKENS
    while size < max_tokens:
        sizes += [size] if size < 64 else [size, size // 4 * 5, size // 2 * 3]
        size *= 2
    return [*(size for size in sizes if size < max_tokens), max_tokens]


class MixedBuffers:
    """A step of up to `max_tokens` tokens of `max_rows` sequences in memory that stays where it is."""

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        blocks_per_row: int,
        block_size: int,
        spare_block: int,
        device: torch.device,
        kernels: bool = False,
    ) -> None:
        """With `kernels` a step is filled in by one of Triton's, in one launch."""
        self._kernels = kernels
        self.sizes = token_sizes(max_tokens)
        self.max_rows = max_rows
        self.blocks_per_row = blocks_per_row
        self._block_size = block_size
        self._spare_block = spare_block
        # The sequence of padding may be longer than any that is served.
        width = max(blocks_per_row, -(-max_tokens // block_size))

        def column(size: int, dtype: torch.dtype, *more: int) -> Tensor:
            return torch.zeros(size, *more, dtype=dtype, device=device)

        self._tokens, self._positions, self._slots = (column(max_tokens, torch.int64) for _ in range(3))
        self._query_start = column(max_rows + 2, torch.int32)
        self._kv_len = column(max_rows + 1, torch.int32)
        self._block_tables = column(max_rows + 1, torch.int32, width)
        self._logit_positions = column(max_rows, torch.int64)

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Copy the batch into the buffers, and pad it to `size` tokens."""
        if self._kernels:
            self._launch(batch, size)
            return
        batch = batch.resolved()
        tokens, rows = batch.num_tokens, batch.num_sequences
        for column, values in (
            (self._tokens[:tokens], batch.tokens),
            (self._positions[:tokens], batch.positions),
            (self._slots[:tokens], batch.slots),
            (self._query_start[: rows + 1], batch.query_start),
            (self._kv_len[:rows], batch.kv_len),
            (self._block_tables[:rows, : batch.block_tables.shape[1]], batch.block_tables),
            (self._logit_positions[: len(batch.logit_positions)], batch.logit_positions),
        ):
            column.copy_(values)
        for column, value in (
            (self._tokens[tokens:size], 0),
            (self._positions[tokens:size], 0),
            (self._slots[tokens:size], self._spare_block * self._block_size),
            (self._query_start[rows + 1 :], size),
            (self._kv_len[rows:], max(1, size - tokens)),
            (self._block_tables[rows], self._spare_block),
            (self._logit_positions[len(batch.logit_positions) :], 0),
        ):
            column.fill_(value)

    def _launch(self, batch: ForwardBatch, size: int) -> None:
        from model_worker.cuda import fill_kernel as kernels

        owners = batch.owners
        kernels.fill_mixed_kernel[(max(size, self.max_rows + 2),)](
            self._tokens,
            self._positions,
            self._slots,
            self._query_start,
            self._kv_len,
            self._block_tables,
            self._logit_positions,
            batch.tokens,
            batch.positions,
            batch.slots,
            batch.query_start,
            batch.kv_len,
            batch.block_tables,
            batch.logit_positions,
            batch.tokens if owners is None else owners,
            batch.tokens if owners is None else batch.last_tokens,
            batch.num_tokens,
            batch.num_sequences,
            len(batch.logit_positions),
            size,
            self.max_rows,
            batch.block_tables.shape[1],
            self._block_tables.shape[1],
            self._block_tables.stride(0),
            batch.block_tables.stride(0),
            self._spare_block,
            self._spare_block * self._block_size,
            int(owners is not None),
            BLOCK=kernels.BLOCK,
        )

    def fill_whole(self, size: int) -> None:
        """Let all of `size` tokens be padding."""
        self._slots.fill_(self._spare_block * self._block_size)
        self._query_start[1:].fill_(size)
        self._kv_len.fill_(size)
        self._block_tables.fill_(self._spare_block)

    def batch(self, size: int) -> ForwardBatch:
        """Return a new batch of `size` tokens: its derived values must be derived in the graph."""
        return ForwardBatch(
            tokens=self._tokens[:size],
            positions=self._positions[:size],
            query_start=self._query_start,
            kv_len=self._kv_len,
            block_tables=self._block_tables,
            slots=self._slots[:size],
            logit_positions=self._logit_positions,
            block_size=self._block_size,
            # Bounds of all steps to come: they are part of what is recorded.
            max_query=size,
            max_kv=self.blocks_per_row * self._block_size,
        )


class MixedGraphs:
    """`forward` recorded for every number of tokens. All records write their logits to the same place."""

    def __init__(self, forward: Forward, buffers: MixedBuffers, recorded: Recorder) -> None:
        self.buffers = buffers
        self._logits: Tensor | None = None

        def step(size: int) -> Callable[[], Tensor]:
            def run() -> Tensor:
                logits = forward(buffers.batch(size))
                if self._logits is None:
                    self._logits = torch.empty_like(logits)
                return self._logits.copy_(logits)

            return run

        # Once beforehand, so that no record owns the place of logits. The largest first: the others find room in the
        # memory that it has taken.
        buffers.fill_whole(buffers.sizes[0])
        step(buffers.sizes[0])()
        self._graphs = {}
        for size in reversed(buffers.sizes):
            buffers.fill_whole(size)
            self._graphs[size] = recorded(step(size))

    @property
    def logits(self) -> Tensor:
        """The place of logits [max_rows, vocabulary]."""
        assert self._logits is not None
        return self._logits

    @property
    def sizes(self) -> list[int]:
        """The numbers of tokens of recorded steps."""
        return self.buffers.sizes

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether `run` can do the batch."""
        return batch.adapters is None and self.holds(batch)

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether the buffers can have the batch."""
        buffers = self.buffers
        return (
            batch.embeddings is None
            and batch.seen is None
            and batch.positions.dim() == 1
            and 0 < len(batch.logit_positions) <= buffers.max_rows
            and batch.num_sequences <= buffers.max_rows
            and batch.num_tokens <= buffers.sizes[-1]
            and batch.block_tables.shape[1] <= buffers.blocks_per_row
        )

    def run(self, batch: ForwardBatch) -> Tensor:
        """Return the logits of the batch. The next run may overwrite them."""
        sizes = self.sizes
        size = sizes[bisect_left(sizes, batch.num_tokens)]
        self.buffers.fill(batch, size)
        return self._graphs[size]()[: len(batch.logit_positions)]
