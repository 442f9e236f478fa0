"""The draw of rows whose tokens the host takes: stages, scaling, truncations, the token, and what is reported of it.

`sampler.py` says the order and the meaning of each step. Knows rows of logits and of values; not how they are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobMode, LogprobReports
from model_worker.sampling.draw import choose, only_kept
from model_worker.sampling.logprobs import ReportBuilder, Wanted
from model_worker.sampling.row_values import choices_of
from model_worker.sampling.scaling import change_and_scale
from model_worker.sampling.stages import AnyStage
from model_worker.sampling.typical import only_typical


@dataclass(frozen=True, eq=False)
class HostDraw:
    """Draws for the host, which waits for the tokens. `stages` and `wanted` are the sampler's own, and change.

    Without kernels a CPU draws in plain torch, which is slower and gives the same.
    """

    vocab_size: int
    has_kernels: bool
    stages: Sequence[AnyStage]
    # What rows want reported, by row.
    wanted: Mapping[int, Wanted]

    def choose(
        self, logits: torch.Tensor, rows: NDArray[np.int32], values: NDArray[np.void], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], torch.Tensor]:
        """Return tokens (-1 for a bad row), log-probabilities, and the logits that were drawn from.

        `logits` are shifted and scaled afterwards; those drawn from are the same but for rows with typical_p, whose
        other truncations are done there and gone from `values`.
        """
        top, first = change_and_scale(logits, self.stages, rows, positions, values["temperature"])
        bad = ~torch.isfinite(top).cpu().numpy()
        if bad.any():
            # Zeros keep the rest of the batch free of special cases; the row's token is thrown away.
            logits[_on_device(np.flatnonzero(bad), logits.device)] = 0.0
        typical = np.flatnonzero(values["typical_p"] < 1)
        drawn = self._typical(logits, first, typical, values, positions) if len(typical) else logits
        tokens, logprobs = choose(drawn, first, choices_of(values, positions), self.has_kernels)
        for i in typical[values["logprobs"][typical] == LogprobMode.TEMPERED].tolist():
            row = logits[i].double()
            logprobs[i] = float(row[int(tokens[i])] - torch.logsumexp(row, -1))
        for stage in self.stages:
            stage.chosen(rows, tokens)
        tokens[bad] = -1
        return tokens, logprobs, drawn

    def _typical(
        self,
        logits: torch.Tensor,
        first: torch.Tensor,
        typical: NDArray[np.intp],
        values: NDArray[np.void],
        positions: NDArray[np.int64],
    ) -> torch.Tensor:
        """Return a copy in which rows `typical` have nothing but what all their truncations keep; `first` is
        updated."""
        index = _on_device(typical, logits.device)
        drawn = logits.clone()
        part = values[typical]
        part["greedy"] = False  # so that top-k 1 counts as what it is
        kept = only_kept(logits[index], choices_of(part, positions[typical]))
        drawn[index] = only_typical(kept, part["typical_p"])
        first[index] = drawn[index].max(dim=-1).indices
        values["top_k"][typical] = self.vocab_size
        values["top_p"][typical] = 1.0
        values["log_min_p"][typical] = -np.inf
        return drawn

    def report(
        self,
        scaled: torch.Tensor,
        drawn: torch.Tensor,
        rows: NDArray[np.int32],
        values: NDArray[np.void],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> LogprobReports | None:
        """Report the most probable and the named tokens, for rows that want it, by the distribution of the row's
        mode."""
        asking = {row for row, wanted in self.wanted.items() if wanted.any}
        wanted = [i for i, row in enumerate(rows.tolist()) if row in asking] if asking else []
        if not wanted:
            return None
        builder = ReportBuilder()
        for i in wanted:
            part = slice(i, i + 1)
            logits = scaled[part]
            if values["logprobs"][i] == LogprobMode.WARPED:
                logits = only_kept(drawn[part], choices_of(values[part], positions[part]))
            # A bad row has no token; its report is thrown away with it.
            chosen = np.maximum(tokens[part], 0)
            builder.add(int(rows[i]), int(positions[i]), logits, chosen, self.wanted[int(rows[i])])
        return builder.columns()


def _on_device(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(device)
