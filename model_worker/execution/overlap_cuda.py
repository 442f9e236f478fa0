"""Steps sampled on the device and launched before the tokens of the step before are read.

The tokens stay on the device, where the next step finds them; the host reads a step's tokens when the next one has been
launched. A grammar needs a token to say what may follow it: a step with such rows launches its pass, waits for the
tokens of the step before while the device computes, and then launches its draw with the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import Step, StepResult
from model_worker.device_copy import Download, Mark, upload, upload_together
from model_worker.execution import reports
from model_worker.execution.base import DeviceStep
from model_worker.execution.flight import Pending
from model_worker.rows import PackedStep
from model_worker.sampling.ahead import Ahead
from model_worker.sampling.draw_records import RowMasks
from model_worker.sampling.sampler import Sampled


class _Launched(NamedTuple):
    """A launched draw: what it leaves on the device, and its way to the host."""

    ahead: Ahead
    began: Mark
    copied: Download

    def read(self) -> tuple[Sampled, int]:
        """Wait for the choices. Returns them, and the microseconds that the device took for pass and draw."""
        sampled = Sampled.of(*self.ahead.read(self.copied.wait()))
        return sampled, self.copied.done.us_since(self.began)


class OverlapCuda:
    """Takes steps that compute tokens and their log-probabilities only, for rows that the device can draw."""

    def __init__(self, shared: DeviceStep) -> None:
        self._shared = shared
        # Last tokens of rows that the host has not read.
        self._last_tokens = torch.zeros(shared.rows.max_rows, dtype=torch.int64, device=shared.backend.device)

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        return packed.plain and not self._shared.sampler.waits(packed.sampling_rows)

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        shared = self._shared
        began = Mark(shared.backend.device)
        rows = packed.sampling_rows
        grammars = shared.masks
        if grammars is not None and not grammars.constrain(rows).any():
            grammars = None
        with torch.inference_mode():
            # What the draw takes of the rows goes along. Masks, which are not known yet, do not.
            masked = None if grammars is None else np.flatnonzero(grammars.constrain(rows))
            drawing = shared.sampler.arrays(rows, packed.positions, masked=masked)
            owners = shared.rows.owners(packed)
            batch = shared.batch(packed, owners=owners, last_tokens=self._last_tokens, drawing=drawing)
            logits, there = shared.backend.logits(batch)[: len(packed.sampling)], batch.drawing
            masks = None
            if grammars is not None:
                packed, logits = self._after_earlier(step, packed, logits)
                rows = packed.sampling_rows
                masks, failed = grammars.of(rows)
                shared.refused |= failed
                arrays = shared.sampler.arrays(rows, packed.positions, masks)
                # Rows have gone on, or a mask is missing.
                if not np.array_equal(arrays[0], drawing[0]):
                    there = tuple(upload_together(arrays, logits.device))
            errors = shared.refusals(rows)
            launched = self._draw(packed, rows, logits, began, there, masks)
        number = shared.rows.launch(packed)

        def read() -> StepResult:
            sampled, device_us = launched.read()
            shared.rows.read(packed, sampled.tokens, number)
            forced = self._forced(rows, sampled, number)
            result = shared.result(step.step, step.incarnation, rows, sampled, errors, device_us)
            if forced:
                result = reports.with_forced(result, forced)
            return result if sampled.reports is None else reports.with_reports(result, sampled.reports, None)

        pending = Pending(read)
        shared.in_flight.add(pending)
        return pending

    def _after_earlier(self, step: Step, packed: PackedStep, logits: torch.Tensor) -> tuple[PackedStep, torch.Tensor]:
        """Read all earlier steps. Rows that their grammars have sent on by further tokens draw nothing now."""
        self._shared.in_flight.finish()
        again = self._shared.rows.pack(step)
        still = np.isin(packed.sampling, again.sampling)
        return again, logits if still.all() else logits[upload(np.flatnonzero(still), logits.device)]

    def _draw(
        self,
        packed: PackedStep,
        rows: NDArray[np.int32],
        logits: torch.Tensor,
        began: Mark,
        there: Sequence[torch.Tensor],
        masks: RowMasks | None,
    ) -> _Launched:
        """Launch the draw, and the copy of what it gives. `there` is what the device has of the rows."""
        ahead = self._shared.sampler.sample_ahead(logits, rows, packed.positions, there, masks, self._last_tokens)
        if self._shared.sampler.needs_host(rows):
            # What was drawn is counted: a second launch would count it again.
            self._shared.repeatable = False
        return _Launched(ahead, began, Download(ahead.memory))

    def _forced(self, rows: NDArray[np.int32], sampled: Sampled, number: int) -> dict[int, list[int]]:
        """Tell grammars what was drawn for rows that have not gone to others. Returns the tokens that they force."""
        shared = self._shared
        if shared.masks is None:
            return {}
        own = shared.rows.own(rows, number)
        forced = shared.masks.sampled(rows[own], sampled.tokens[own])
        for row, tokens in forced.items():
            shared.rows.follow(row, tokens)
            shared.sampler.follow(row, tokens)
        return forced
