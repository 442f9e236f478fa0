"""The draw of rows whose tokens stay on the device, launched without a wait: in kernels, or in operations of torch.

Both give what `host_draw.py` gives. Knows rows of logits and of values; not how they are held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobMode
from model_worker.cuda.draw_record import NAMES
from model_worker.device_copy import HostRing, upload, upload_together
from model_worker.sampling import draw_cuda
from model_worker.sampling.ahead import Ahead, AskingRows, with_reports
from model_worker.sampling.columns import forbid
from model_worker.sampling.device_penalties import DevicePenaltyStage
from model_worker.sampling.draw_records import RecordTable, RowMasks
from model_worker.sampling.draw_triton import DrawStep, TritonDraw
from model_worker.sampling.row_values import choices_of
from model_worker.sampling.scaling import change_and_scale
from model_worker.sampling.stages import AnyStage

_PLACE = NAMES.index("place")


@dataclass(frozen=True)
class RowsAhead:
    """The rows of a step, and what is on the device of them."""

    rows: NDArray[np.int32]
    values: NDArray[np.void]
    positions: NDArray[np.int64]
    # Those that need more than their largest logit.
    worked: NDArray[np.bool_]
    # As `RecordTable.arrays` has them; all rows' lists.
    records: torch.Tensor
    lists: torch.Tensor | None
    # Of grammars, on the host.
    masks: RowMasks | None
    # i64[all rows], on the device.
    last_tokens: torch.Tensor | None

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """Whether a row is no greedy one. A free row is one."""
        found: NDArray[np.bool_] = self.worked & ~self.values["greedy"]
        return found


@dataclass(eq=False)
class DeviceDraw:
    """Draws without a wait. `stages` and `records` are the sampler's own, and change."""

    stages: Sequence[AnyStage]
    # Whose counts kernels take; None: the device is a CPU's, and has operations alone.
    penalties: DevicePenaltyStage | None
    records: RecordTable
    # Bitmasks of the steps in flight.
    lent_masks: HostRing
    # None: operations draw.
    kernels: TritonDraw | None = None

    def draw(self, logits: torch.Tensor, step: RowsAhead) -> Ahead:
        """Draw tokens, and compute what is reported of them. `logits` may be changed. What is counted of the tokens is
        changed last."""
        asked = self._asked(step)
        if not len(step.rows):
            return Ahead(torch.empty(0, dtype=torch.int64, device=logits.device))
        if self.kernels is None:
            return self._by_operations(logits, step, asked)
        return self._by_kernels(self.kernels, logits, step, asked)

    def _by_kernels(
        self, kernels: TritonDraw, logits: torch.Tensor, step: RowsAhead, asked: AskingRows | None
    ) -> Ahead:
        penalties = self.penalties
        size = None if asked is None else asked.size(logits.shape[1])
        drawing = DrawStep(
            records=step.records,
            draws=bool((step.drawn | (step.values["logprobs"] == LogprobMode.WARPED)).any()),
            counts=penalties.counts if penalties is not None and penalties.holds(step.rows) else None,
            changes=self.records.changing(step.rows),
            lists=step.lists,
            reports=size,
            last_tokens=step.last_tokens,
        )
        with self._placed(kernels, step.masks) as words:
            tokens, packed = kernels.draw(logits, replace(drawing, masks=words))
        return Ahead(tokens, asked, size, packed)

    @contextmanager
    def _placed(self, kernels: TritonDraw, masks: RowMasks | None) -> Iterator[torch.Tensor | None]:
        """Put bitmasks where the kernels that are launched within read them: in memory of the host, if they can."""
        if masks is None:
            yield None
        elif kernels.reads_host_memory:
            with self.lent_masks.lent(masks.words) as words:
                yield words
        else:
            yield upload(masks.words, self.lent_masks.device)

    def _by_operations(self, logits: torch.Tensor, step: RowsAhead, asked: AskingRows | None) -> Ahead:
        if step.masks is not None:
            forbid(logits, *upload_together(step.masks, logits.device))
        values, scaled = step.values, logits
        if step.worked.any():
            scaled = logits.to(torch.float32, copy=True)
            top, tokens = change_and_scale(scaled, self.stages, step.rows, step.positions, values["temperature"])
        else:
            top, tokens = logits.max(dim=-1)
        drawn = np.flatnonzero(step.drawn)
        if len(drawn) == len(step.rows):
            tokens = draw_cuda.draw(scaled, choices_of(values, step.positions))
        elif len(drawn):
            index = upload(drawn, logits.device)
            some = draw_cuda.draw(scaled[index], choices_of(values[drawn], step.positions[drawn]))
            tokens = tokens.index_copy(0, index, some)
        tokens = torch.where(torch.isfinite(top), tokens, -1)
        if step.last_tokens is not None:
            step.last_tokens.index_copy_(0, step.records[:, _PLACE], tokens.clamp(min=0))
        ahead = Ahead(tokens) if asked is None else _reported(tokens, scaled, asked, step)
        for stage in self.stages:
            stage.launched(step.rows, tokens)
        return ahead

    def _asked(self, step: RowsAhead) -> AskingRows | None:
        """Return the rows that report more than a token; None if there are none."""
        values = step.values
        index = np.flatnonzero((values["logprobs"] > 0) | values["reports"])
        if not len(index):
            return None
        rows, values = step.rows[index], values.take(index)
        names = self.records.names(rows, int(values["named"].max()))
        tops = np.where(values["reports"], values["top_logprobs"], -1)
        return AskingRows(index, rows, step.positions[index], tops, names, values["named"])


def _reported(tokens: torch.Tensor, scaled: torch.Tensor, asked: AskingRows, step: RowsAhead) -> Ahead:
    """Add what rows report to the tokens of a step, given the logits that they were drawn from."""

    def logits_of(some: slice) -> torch.Tensor:
        part = asked.index[some]
        logits = scaled[upload(part, scaled.device)]
        values = step.values[part]
        warped = np.flatnonzero(values["logprobs"] == LogprobMode.WARPED)
        if len(warped):
            index = upload(warped, logits.device)
            found = logits[index]
            kept = draw_cuda.kept(found, choices_of(values[warped], step.positions[part][warped]))
            logits[index] = torch.where(kept, found, -torch.inf)
        return logits

    return with_reports(tokens, asked, scaled.shape[1], logits_of)
