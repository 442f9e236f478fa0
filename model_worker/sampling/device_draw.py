"""The draw of rows whose tokens stay on the device, launched without a wait: in kernels, or in operations of torch.

Both give what `host_draw.py` gives. Knows rows of logits and of values; not how they are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobMode
from model_worker.cuda.draw_record import NAMES
from model_worker.device_copy import upload
from model_worker.sampling import draw_cuda
from model_worker.sampling.ahead import Ahead, AskingRows, with_reports
from model_worker.sampling.columns import forbid
from model_worker.sampling.device_penalties import DevicePenaltyStage
from model_worker.sampling.draw import Edge
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.draw_triton import DrawStep, TritonDraw
from model_worker.sampling.logprobs import Wanted
from model_worker.sampling.row_values import choices_of
from model_worker.sampling.scaling import change_and_scale, shift_and_divide
from model_worker.sampling.stages import AnyStage

_PLACE = NAMES.index("place")


class Drawn(NamedTuple):
    """The tokens of a step, i64[rows] on the device, and what its reports need of some of its rows."""

    tokens: torch.Tensor
    # Their logits, shifted and scaled, as a copy.
    logits_of: Callable[[NDArray[np.intp]], torch.Tensor]
    # Where their kept tokens end, given these logits.
    edges_of: Callable[[torch.Tensor, NDArray[np.intp]], Edge]


@dataclass(frozen=True)
class RowsAhead:
    """The rows of a step, and what is on the device of them."""

    rows: NDArray[np.int32]
    values: NDArray[np.void]
    positions: NDArray[np.int64]
    # Those that need more than their largest logit.
    worked: NDArray[np.bool_]
    # As `RecordTable.arrays` has them.
    there: Sequence[torch.Tensor]
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
    """Draws without a wait. `stages` and `wanted` are the sampler's own, and change."""

    stages: Sequence[AnyStage]
    penalties: DevicePenaltyStage | None
    # What rows want reported, by row.
    wanted: Mapping[int, Wanted]
    # None: operations draw.
    kernels: TritonDraw | None = None

    def draw(self, logits: torch.Tensor, step: RowsAhead) -> Ahead:
        """Draw tokens, and compute what is reported of them. `logits` may be changed. What is counted of the tokens is
        changed last."""
        asked = self._asked(step)
        if not len(step.rows):
            return Ahead(torch.empty(0, dtype=torch.int64, device=logits.device))
        if self.kernels is None:
            drawn = self._by_operations(logits, step)
            counted = False
        else:
            # Memory for reports may be missing: then nothing was counted, and the step can be repeated.
            counted = asked is None
            drawn = self._by_kernels(self.kernels, logits, step, counted)
        ahead = Ahead(drawn.tokens) if asked is None else _reported(drawn, asked, step, logits.shape[1])
        for stage in () if counted else self.stages:
            stage.launched(step.rows, drawn.tokens)
        return ahead

    def _by_kernels(self, kernels: TritonDraw, logits: torch.Tensor, step: RowsAhead, counted: bool) -> Drawn:
        penalties = self.penalties
        rules = [stage for stage in self.stages if stage is not penalties and stage.holds(step.rows)]

        def change(changed: torch.Tensor) -> None:
            for stage in rules:
                stage.apply(changed, step.rows, step.positions)

        drawing = DrawStep(
            records=step.there[0],
            draws=bool((step.drawn | (step.values["logprobs"] == LogprobMode.WARPED)).any()),
            masks=None if step.masks is None else step.there[1],
            counts=penalties.counts if penalties is not None and penalties.holds(step.rows) else None,
            counts_tokens=counted,
            rules=change if rules else None,
            last_tokens=step.last_tokens,
        )
        tokens, source = kernels.draw(logits, drawing)

        def logits_of(some: NDArray[np.intp]) -> torch.Tensor:
            found = source[upload(some, source.device)].float()
            shift_and_divide(found, found.amax(dim=-1), step.values["temperature"][some])
            return found

        return Drawn(tokens, logits_of, lambda _, some: kernels.edges(upload(some, source.device)))

    def _by_operations(self, logits: torch.Tensor, step: RowsAhead) -> Drawn:
        if step.masks is not None:
            forbid(logits, upload(step.masks.places, logits.device), step.there[1])
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
            step.last_tokens.index_copy_(0, step.there[0][:, _PLACE], tokens.clamp(min=0))

        def edges_of(found: torch.Tensor, some: NDArray[np.intp]) -> Edge:
            return draw_cuda.edges_of(found, choices_of(values[some], step.positions[some]))

        return Drawn(tokens, lambda some: scaled[upload(some, scaled.device)], edges_of)

    def _asked(self, step: RowsAhead) -> AskingRows | None:
        """Return the rows that report more than a token; None if there are none."""
        values = step.values
        index = np.flatnonzero((values["logprobs"] > 0) | values["reports"])
        if not len(index):
            return None
        rows, values = step.rows[index], values[index]
        names = np.zeros((len(index), int(values["named"].max())), np.int64)
        for i in np.flatnonzero(values["named"]).tolist():
            names[i, : values["named"][i]] = self.wanted[int(rows[i])].ids
        tops = np.where(values["reports"], values["top_logprobs"], -1)
        return AskingRows(index, rows, step.positions[index], tops, names, values["named"])


def _reported(drawn: Drawn, asked: AskingRows, step: RowsAhead, width: int) -> Ahead:
    """Add what rows report to the tokens of a step."""

    def logits_of(some: slice) -> torch.Tensor:
        part = asked.index[some]
        logits = drawn.logits_of(part)
        warped = np.flatnonzero(step.values["logprobs"][part] == LogprobMode.WARPED)
        if len(warped):
            index = upload(warped, logits.device)
            found = logits[index]
            kept = draw_cuda.within(found, drawn.edges_of(found, part[warped]))
            logits[index] = torch.where(kept, found, -torch.inf)
        return logits

    return with_reports(drawn.tokens, asked, width, logits_of)
