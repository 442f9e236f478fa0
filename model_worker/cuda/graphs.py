"""Decode steps as recorded graphs: one for each of a few batch sizes, replayed with the step's values in its buffers.

Launching a small model's kernels one by one takes longer than running them; a graph launches them at once. It runs the
same kernels on the same memory each time, so a step is copied into fixed buffers, and rows that it lacks for the next
recorded size are padded: they read and write a block, and a recurrent state, that belong to no sequence. The caller
gives the recorder (`record` for CUDA), so the rest does not know devices. Knows batches; it does not know models or
sampling.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.device_copy import upload_together

Forward = Callable[[ForwardBatch], Tensor]
# Runs or records a function, and returns a function that runs it again on the same memory, with its result.
Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def bucket_sizes(max_rows: int) -> list[int]:
    """Return 1, 2 and 4, then steps of 8, of 16 from 64 on, and so on up to 256, and `max_rows` itself.

    A step computes as many rows as its bucket has: at most 7 of 64 in vain, and a fifth of more.
    """
    sizes = [1, 2, 4]
    while sizes[-1] < max_rows:
        last = sizes[-1]
        sizes.append((last // 8 + 1) * 8 if last < 64 else last + min(256, 1 << (last.bit_length() - 3)))
    return [*(size for size in sizes if size < max_rows), max_rows]


class DecodeBuffers:
    """A decode step of up to `max_rows` rows in memory that stays where it is."""

    def __init__(
        self,
        max_rows: int,
        blocks_per_row: int,
        block_size: int,
        spare_block: int,
        device: torch.device,
        kernels: bool = False,
        spare_row: int | None = None,
    ) -> None:
        """With `kernels` a step is filled in by one of Triton's, in one launch. With a `spare_row`, whose state belongs
        to no sequence, sequences have recurrent states: padding uses that one."""
        self._kernels = kernels
        self.device = device
        self.max_rows = max_rows
        self.blocks_per_row = blocks_per_row
        self.block_size = block_size
        self._spare_block = spare_block

        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(max_rows, *shape, dtype=dtype, device=device)

        self._tokens, self._positions, self._slots = (column(torch.int64) for _ in range(3))
        self._kv_len = column(torch.int32)
        self._block_tables = column(torch.int32, blocks_per_row)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._logit_positions = torch.arange(max_rows, device=device)
        self._spare_row = spare_row
        self._state_rows = None if spare_row is None else column(torch.int64)

    def fill_whole(self, size: int) -> None:
        """Let all of `size` rows be padding."""
        self.fill(self.batch(0), size)

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Copy the batch into the first `size` rows, and pad the rest of them."""
        if self._state_rows is not None:
            padded = np.full(size, self._spare_row, np.int64)
            padded[: batch.num_sequences] = batch.state_rows
            self._state_rows[:size].copy_(upload_together([padded], self.device)[0])
        if self._kernels:
            self._launch(batch, size)
            return
        batch = batch.resolved()
        rows = batch.num_tokens
        table = self._block_tables[:, : batch.block_tables.shape[1]]
        for column, values in (
            (self._tokens, batch.tokens),
            (self._positions, batch.positions),
            (self._slots, batch.slots),
            (self._kv_len, batch.kv_len),
            (table, batch.block_tables),
        ):
            column[:rows].copy_(values)
        if rows < size:
            # Each pads with a sequence of one token in the spare block.
            for column, value in (
                (self._tokens, 0),
                (self._positions, 0),
                (self._slots, self._spare_block * self.block_size),
                (self._kv_len, 1),
                (self._block_tables[:, :1], self._spare_block),
            ):
                column[rows:size].fill_(value)

    def _launch(self, batch: ForwardBatch, size: int) -> None:
        from model_worker.cuda import fill_kernel as kernels

        owners = batch.owners
        kernels.fill_decode_kernel[(size,)](
            self._tokens,
            self._positions,
            self._slots,
            self._kv_len,
            self._block_tables,
            batch.tokens,
            batch.positions,
            batch.slots,
            batch.kv_len,
            batch.block_tables,
            batch.tokens if owners is None else owners,
            batch.tokens if owners is None else batch.last_tokens,
            batch.num_tokens,
            batch.block_tables.shape[1],
            self._block_tables.stride(0),
            batch.block_tables.stride(0),
            self._spare_block,
            self._spare_block * self.block_size,
            int(owners is not None),
            BLOCK=kernels.BLOCK,
        )

    def batch(self, size: int) -> ForwardBatch:
        """Return the first `size` rows as a new batch: its derived values must be derived in the graph."""
        return ForwardBatch(
            tokens=self._tokens[:size],
            positions=self._positions[:size],
            query_start=self._query_start[: size + 1],
            kv_len=self._kv_len[:size],
            block_tables=self._block_tables[:size],
            slots=self._slots[:size],
            logit_positions=self._logit_positions[:size],
            block_size=self.block_size,
            max_query=1,
            # A bound of all steps to come: it is part of what is recorded.
            max_kv=self.blocks_per_row * self.block_size,
            recorded_rows=None if self._state_rows is None else self._state_rows[:size],
        )


class DecodeGraphs:
    """`forward` recorded for every bucket size."""

    def __init__(self, forward: Forward, buffers: DecodeBuffers, recorded: Recorder) -> None:
        self.buffers = buffers
        self.sizes = bucket_sizes(buffers.max_rows)

        def step(size: int) -> Callable[[], Tensor]:
            return lambda: forward(buffers.batch(size))

        # The largest first: the others find room in the memory that it has taken.
        graphs = {}
        for size in reversed(self.sizes):
            buffers.fill_whole(size)
            graphs[size] = recorded(step(size))
        self._graphs = graphs

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether `run` can do the batch."""
        return batch.adapters is None and self.holds(batch)

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether the buffers can have the batch."""
        buffers = self.buffers
        return (
            batch.embeddings is None
            and batch.positions.dim() == 1
            and batch.num_tokens <= buffers.max_rows
            and batch.block_tables.shape[1] <= buffers.blocks_per_row
            and batch.decodes
        )

    def run(self, batch: ForwardBatch) -> Tensor:
        """Return the logits of the batch's rows. The next run may overwrite them."""
        size = self.sizes[bisect_left(self.sizes, batch.num_tokens)]
        self.buffers.fill(batch, size)
        return self._graphs[size]()[: batch.num_tokens]


class CudaRecorder:
    """Records what a function launches on the current CUDA device; all records share their memory for temporaries."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Once beforehand, on a stream of its own: libraries set themselves up in a first call, which is no part of it.
        stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            function()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = function()
        finally:
            # A capture that fails leaves its stream as the current one.
            torch.cuda.set_stream(current)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
