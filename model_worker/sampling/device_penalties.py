"""Penalties whose counts lie on a device, and grow there by tokens that the host has not read.

A penalised row has a row of a table with a count for each token of the vocabulary. Gives what `penalties.py` gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.device_copy import upload
from model_worker.sampling.columns import PenaltyColumns, penalise
from model_worker.sampling.draw_records import RecordTable
from model_worker.sampling.penalties import PenalizedRow, PenaltyStage
from model_worker.sampling.stages import JoiningRow

COUNT_BYTES = 4


def most_bytes(max_rows: int, vocab_size: int) -> int:
    """Return the memory of the largest table, and of the one before it, which is there while it is copied."""
    before = (1 << (max_rows - 1).bit_length()) // 2
    return (max_rows + before) * vocab_size * COUNT_BYTES


class DevicePenaltyStage(PenaltyStage):
    """The rows with penalties. The table grows with their number."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, records: RecordTable) -> None:
        """The rows' penalties are in their `records`, too."""
        super().__init__(max_rows, vocab_size)
        self._device = device
        self._records = records
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slots = np.full(max_rows, -1, np.int64)
        self._free: list[int] = []

    def state_of(self, joining: JoiningRow) -> PenalizedRow | None:
        state = super().state_of(joining)
        if state is not None and not self._free:
            self._grow()
        return state

    def hold(self, row: int, state: PenalizedRow | None) -> None:
        super().hold(row, state)
        if state is None:
            return
        slot = self._slots[row] = self._free.pop()
        self._records.penalise(row, slot, self._values[row])
        self.counts[slot].zero_()
        if len(state.seen.ids):
            ids = upload(state.seen.ids.astype(np.int64), self._device)
            self.counts[slot].index_copy_(0, ids, upload(state.seen.counts.astype(np.int32), self._device))

    def drop(self, row: int) -> None:
        super().drop(row)
        if self._slots[row] >= 0:
            self._free.append(int(self._slots[row]))
            self._slots[row] = -1

    def change(
        self, logits: torch.Tensor, index: NDArray[np.intp], rows: list[int], positions: NDArray[np.int64]
    ) -> None:
        values = self._values[rows]
        whole = values["whole_sequence"]
        one = np.float32(1)
        columns = PenaltyColumns(
            frequency=(values["frequency"] / np.where(whole, np.maximum(positions, 1), 1)).astype(np.float32),
            presence=values["presence"],
            first=np.where(whole, values["repetition"], one),
            last=np.where(whole, one, values["repetition"]),
        )
        penalise(logits, self.counts, index.astype(np.int64), self._slots[rows], columns)

    def follow(self, row: int, token: int) -> None:
        self.counts[int(self._slots[row]), token] += 1

    def chosen(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
        self.launched(rows, upload(tokens, self._device))

    def launched(self, rows: NDArray[np.int32], tokens: torch.Tensor) -> None:
        index = np.flatnonzero(self._held[rows])
        if not len(index):
            return
        width = self.counts.shape[1]
        found, starts = upload(np.stack([index, self._slots[rows[index]] * width]), self._device)
        ones = torch.ones(len(index), dtype=torch.int32, device=self._device)
        # A row without a token, -1, has ended.
        self.counts.view(-1).index_add_(0, starts + tokens[found].clamp(min=0), ones)

    def _grow(self) -> None:
        """Double the table. ValueError where the device has no memory for it."""
        held, width = self.counts.shape
        size = min(max(4, 2 * held), len(self._slots))
        try:
            counts: Any = torch.zeros((size, width), dtype=torch.int32, device=self._device)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"the GPU has no memory to count tokens for penalties ({size * width * COUNT_BYTES >> 20} MiB): "
                "leave the penalties out, or lower kv_memory"
            ) from None
        counts[:held] = self.counts
        self.counts = counts
        self._free += range(held, size)
