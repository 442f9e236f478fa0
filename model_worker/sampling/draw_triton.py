"""The draw of `draw.py` on a GPU in our own Triton kernels: no sort, and noise only for the tokens that are kept.

Four launches, or two where no row is drawn: one reads all logits, applies masks, penalties and rules, and finds the
largest of each tile; one finds where a row's kept tokens end; one draws in each part of a row; and one takes a row's
token from those of its parts, counts it, puts it where the next step finds it, and writes what the row reports. Knows
records of rows; knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from model_worker.cuda.draw_record import NAMES
from model_worker.sampling.ahead import ReportSize, report_start

# Logits of a tile, and tiles that a program reads.
_BLOCK = 1024
_BLOCKS = 8
# Logits that the search for edges, in which a row has one program, reads at a time, and its warps.
_EDGE_BLOCK = 4096
_EDGE_WARPS = 16
# Warps of a program that writes a row's report.
_REPORT_WARPS = 4
# Tokens of a row that may lie before the edge or at it, for a search among these alone.
_ROOM = 4096


@dataclass(frozen=True)
class DrawStep:
    """What a draw takes of a step. `records` are i64[rows, words], in the order of draw_record.py."""

    records: torch.Tensor
    # Whether the largest logits are not enough: a row is drawn, or its kept tokens are wanted.
    draws: bool
    # Bitmasks i32[n, words] of rows.
    masks: torch.Tensor | None = None
    # How many rows have penalties, or rules on tokens: the others' logits stay as they are.
    changes: int = 0
    # Counts i32[slots, width] of tokens, where rows are penalised.
    counts: torch.Tensor | None = None
    # i64: rules of rows, and tokens that they name.
    lists: torch.Tensor | None = None
    # What is reported beside tokens.
    reports: ReportSize | None = None
    # i64[all rows]: the last token of each place.
    last_tokens: torch.Tensor | None = None


class _Memory(NamedTuple):
    """What kernels tell each other: the same memory in all steps, which follow each other."""

    tops: torch.Tensor
    firsts: torch.Tensor
    masses: torch.Tensor
    arrived: torch.Tensor
    row_tops: torch.Tensor
    edges: torch.Tensor
    ties: torch.Tensor
    scratch: torch.Tensor
    scores: torch.Tensor
    picked: torch.Tensor
    kept_masses: torch.Tensor


class TritonDraw:
    """Draws from logits that are `width` wide."""

    def __init__(self, device: torch.device, width: int, reads_host_memory: bool = True) -> None:
        """`reads_host_memory`: bitmasks may lie in pinned memory of the host."""
        self.reads_host_memory = reads_host_memory
        self._device = device
        self._width = width
        self._tiles = -(-width // _BLOCK)
        self._parts = -(-self._tiles // _BLOCKS)
        self._memory: _Memory | None = None

    def draw(self, logits: torch.Tensor, step: DrawStep) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return tokens i64[rows], -1 for a bad row; and where rows report, the memory i32 that has these tokens first,
        and from `report_start(rows)` on the reports. Masks are applied to `logits`."""
        assert step.records.shape == (len(logits), len(NAMES))
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        # Of rows that change, in the order of their records. Without some it is not read.
        changed = self._room(len(logits)).tops
        if step.changes:
            changed = torch.empty((step.changes, self._width), dtype=torch.float32, device=self._device)
        self._extremes(logits, changed, step)
        if step.draws:
            self._draw(logits, changed, step.records)
        return self._finish(logits, changed, step)

    def _room(self, rows: int) -> _Memory:
        if self._memory is None or len(self._memory.edges) < rows:

            def empty(dtype: torch.dtype, *more: int) -> torch.Tensor:
                return torch.empty(rows, *more, dtype=dtype, device=self._device)

            self._memory = _Memory(
                tops=empty(torch.float32, self._tiles),
                firsts=empty(torch.int32, self._tiles),
                masses=empty(torch.float64, self._tiles),
                arrived=empty(torch.int32).zero_(),
                row_tops=empty(torch.float32),
                edges=empty(torch.float32),
                ties=empty(torch.int32),
                scratch=empty(torch.float32, _ROOM),
                scores=empty(torch.float64, self._parts),
                picked=empty(torch.int64, self._parts),
                kept_masses=empty(torch.float64, self._parts),
            )
        return self._memory

    def _extremes(self, logits: torch.Tensor, changed: torch.Tensor, step: DrawStep) -> None:
        """Read all logits; `changed` is memory for those of rows that change."""
        from model_worker.cuda.extremes_kernel import extremes_kernel

        memory, masks, counts = self._room(len(logits)), step.masks, step.counts
        extremes_kernel[(len(logits), self._parts)](
            memory.tops,
            memory.firsts,
            memory.masses,
            memory.arrived,
            changed,
            logits,
            step.records,
            memory.firsts if masks is None else masks,
            memory.firsts if counts is None else counts,
            step.records if step.lists is None else step.lists,
            logits.stride(0),
            self._width,
            self._width if counts is None else counts.stride(0),
            self._width,
            0 if masks is None else masks.shape[1],
            self._tiles,
            int(masks is not None),
            COPY=step.changes > 0,
            BLOCK=_BLOCK,
            BLOCKS=_BLOCKS,
        )

    def _draw(self, logits: torch.Tensor, changed: torch.Tensor, records: torch.Tensor) -> None:
        from model_worker.cuda.edge_kernel import edge_kernel
        from model_worker.cuda.pick_kernel import pick_kernel

        rows, memory = len(logits), self._room(len(logits))
        edge_kernel[(rows,)](
            memory.edges,
            memory.ties,
            memory.row_tops,
            memory.scratch,
            memory.tops,
            logits,
            changed,
            records,
            logits.stride(0),
            self._width,
            self._width,
            self._tiles,
            TILE=_BLOCK,
            TILES=_power_of_two(self._tiles),
            BLOCK=_EDGE_BLOCK,
            ROOM=_ROOM,
            num_warps=_EDGE_WARPS,
        )
        pick_kernel[(rows, self._parts)](
            memory.scores,
            memory.picked,
            memory.kept_masses,
            logits,
            changed,
            memory.tops,
            memory.row_tops,
            memory.edges,
            memory.ties,
            records,
            logits.stride(0),
            self._width,
            self._width,
            self._tiles,
            self._parts,
            BLOCK=_BLOCK,
            BLOCKS=_BLOCKS,
        )

    def _finish(
        self, logits: torch.Tensor, changed: torch.Tensor, step: DrawStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from model_worker.cuda.finish_kernel import finish_kernel

        rows, counts, reports = len(step.records), step.counts, step.reports
        memory = self._room(rows)
        found = None
        if reports is None:
            tokens = torch.empty(rows, dtype=torch.int64, device=self._device)
        else:
            start = report_start(rows)
            found = torch.empty(start + reports.rows * reports.words, dtype=torch.int32, device=self._device)
            tokens = found[: 2 * rows].view(torch.int64)
        finish_kernel[(rows,)](
            tokens,
            memory.firsts if found is None else found[start:],
            tokens if step.last_tokens is None else step.last_tokens,
            memory.firsts if counts is None else counts,
            memory.tops,
            memory.firsts,
            memory.masses,
            memory.kept_masses,
            memory.edges,
            memory.ties,
            memory.scores,
            memory.picked,
            # Their type counts for what is compiled.
            memory.tops if reports is None else logits,
            changed,
            step.records if step.lists is None else step.lists,
            step.records,
            logits.stride(0),
            self._width,
            self._width if counts is None else counts.stride(0),
            self._width,
            self._tiles,
            self._parts,
            int(step.draws),
            int(step.last_tokens is not None),
            int(counts is not None),
            0 if reports is None else reports.tops,
            0 if reports is None else reports.words,
            REPORTS=reports is not None,
            TILES=_power_of_two(self._tiles),
            PARTS=_power_of_two(self._parts),
            BLOCK=_BLOCK,
            num_warps=1 if reports is None else _REPORT_WARPS,
        )
        return tokens, found


def _power_of_two(number: int) -> int:
    """Return the least power of two from 2 on that is at least `number`."""
    return max(2, 1 << (number - 1).bit_length())
