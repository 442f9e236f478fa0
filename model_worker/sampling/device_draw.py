"""The draw of rows whose tokens stay on the device: the steps of `host_draw.py`, launched without a wait.

Knows rows of logits and of values; not how they are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobMode
from model_worker.device_copy import upload
from model_worker.sampling import draw_cuda, draw_triton
from model_worker.sampling.ahead import Ahead, AskingRows, with_reports
from model_worker.sampling.logprobs import Wanted
from model_worker.sampling.row_values import choices_of
from model_worker.sampling.stages import AnyStage


@dataclass(eq=False)
class DeviceDraw:
    """Draws without a wait. `stages` and `wanted` are the sampler's own, and change."""

    stages: Sequence[AnyStage]
    # What rows want reported, by row.
    wanted: Mapping[int, Wanted]
    # How the kept tokens' noise and their argmax are found.
    draw_tokens: draw_triton.Draw = draw_cuda.draw

    def draw(
        self, logits: torch.Tensor, rows: NDArray[np.int32], values: NDArray[np.void], positions: NDArray[np.int64]
    ) -> torch.Tensor:
        """Return tokens, -1 for a bad row. `logits` are changed, shifted and scaled."""
        for stage in self.stages:
            stage.apply(logits, rows, positions)
        top, tokens = logits.max(dim=-1)
        logits.sub_(top[:, None])
        if (values["temperature"] != 1).any():
            logits.div_(upload(values["temperature"].copy(), logits.device)[:, None])
        drawn = np.flatnonzero(~values["greedy"])
        if len(drawn) == len(rows):
            tokens = self.draw_tokens(logits, choices_of(values, positions))
        elif len(drawn):
            index = upload(drawn, logits.device)
            some = self.draw_tokens(logits[index], choices_of(values[drawn], positions[drawn]))
            tokens = tokens.index_copy(0, index, some)
        return torch.where(torch.isfinite(top), tokens, -1)

    def asked(
        self,
        tokens: torch.Tensor,
        scaled: torch.Tensor,
        places: NDArray[np.int64],
        rows: NDArray[np.int32],
        values: NDArray[np.void],
        positions: NDArray[np.int64],
    ) -> Ahead:
        """Add what rows report; `scaled[i]` are the logits of `rows[i]`, which is at `places[i]` of the step."""
        wanted = [self.wanted.get(row) for row in rows.tolist()] if self.wanted else [None] * len(rows)
        found = [each if each is not None and (each.top or len(each.ids)) else None for each in wanted]
        asks = (values["logprobs"] > 0) | np.array([each is not None for each in found])
        asking = np.flatnonzero(asks)
        if not len(asking):
            return Ahead(tokens)

        def logits_of(some: slice) -> torch.Tensor:
            part = asking[some]
            logits = scaled[upload(part, scaled.device)]
            warped = np.flatnonzero(values["logprobs"][part] == LogprobMode.WARPED)
            if len(warped):
                index = upload(warped, scaled.device)
                choices = choices_of(values[part[warped]], positions[part[warped]])
                kept = draw_cuda.kept(logits[index], choices)
                logits[index] = torch.where(kept, logits[index], -torch.inf)
            return logits

        asked = AskingRows(places[asking], rows[asking], positions[asking], [found[i] for i in asking.tolist()])
        return with_reports(tokens, asked, scaled.shape[1], logits_of)
