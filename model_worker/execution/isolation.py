"""Isolated rows, which share no forward pass: a step is cut, and the results of its parts are joined.

A row's part of a matrix product depends, in the last bits, on the number of rows. So a row whose result must not depend
on its neighbours is computed without any.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interfaces import HiddenStates, LogprobReports, Step, StepResult, TokenRuns
from model_worker.execution.base import DeviceStep
from model_worker.execution.flight import Pending
from model_worker.execution.synchronous import Synchronous
from model_worker.rows import PackedStep


class Isolation:
    """Takes every step while there are isolated rows. They run one by one, the others together."""

    def __init__(self, shared: DeviceStep, synchronous: Synchronous) -> None:
        self._shared = shared
        self._synchronous = synchronous

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        return bool(self._shared.isolated)

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        self._shared.in_flight.finish()
        pack = self._shared.rows.pack
        results = [self._synchronous.run(part, pack(part)) for part in parts(step, self._shared.isolated)]
        return Pending.finished(together(step, results) if len(results) > 1 else results[0])


def parts(step: Step, isolated: Collection[int]) -> list[Step]:
    """Cut a step: a part for each of `isolated`, and one for all others. No part changes rows."""
    apart = np.isin(step.rows, list(isolated))
    cuts: list[NDArray[Any]] = [np.array([i]) for i in np.flatnonzero(apart)]
    if not apart.all():
        cuts.append(np.flatnonzero(~apart))
    none = np.empty(0, np.int32)
    rest = replace(step, new_blocks=none.reshape(0, 3), drop=none, joins=[], ahead=None)
    return [replace(rest, rows=step.rows[cut], ntok=None if step.ntok is None else step.ntok[cut]) for cut in cuts]


def together(step: Step, results: list[StepResult]) -> StepResult:
    """Join the results of the parts. Rows are in the step's order."""
    place = {row: i for i, row in enumerate(step.rows.tolist())}
    rows = np.concatenate([result.rows for result in results])
    order = np.argsort([place[row] for row in rows.tolist()])
    logprobs = None
    if any(result.logprobs is not None for result in results):
        columns = [np.full(len(r.rows), np.nan, np.float32) if r.logprobs is None else r.logprobs for r in results]
        logprobs = np.concatenate(columns)[order]
    reports = [result.reports for result in results if result.reports is not None]
    hidden = [result.hidden for result in results if result.hidden is not None]
    runs: dict[int, NDArray[np.int32]] = {}
    for result in results:
        runs |= {} if result.forced is None else result.forced.runs()
    again = [result.again for result in results if result.again is not None]
    return replace(
        results[0],
        rows=rows[order],
        tokens=np.concatenate([result.tokens for result in results])[order],
        logprobs=logprobs,
        errors={row: text for result in results for row, text in result.errors.items()},
        device_us=sum(result.device_us for result in results),
        reports=LogprobReports.joined(reports) if reports else None,
        hidden=HiddenStates.joined(hidden) if hidden else None,
        forced=TokenRuns.of(runs) if runs else None,
        again=np.concatenate(again) if again else None,
    )
