"""Steps sampled on the device and launched before the tokens of the step before are read.

The tokens stay on the device, where the next step finds them; the host reads a step's tokens when the next one has been
launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import Step, StepResult
from model_worker.batch import ForwardBatch
from model_worker.device_copy import Download, Mark, upload, upload_together
from model_worker.execution.base import DeviceStep
from model_worker.execution.flight import Pending
from model_worker.rows import PackedStep
from model_worker.sampling.sampler import Sampled


class OverlapCuda:
    """Takes steps that compute tokens only, for rows that are sampled without the host."""

    def __init__(self, shared: DeviceStep) -> None:
        self._shared = shared
        # Last tokens of rows that the host has not read.
        self._last_tokens = torch.zeros(shared.rows.max_rows, dtype=torch.int64, device=shared.backend.device)

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        return packed.plain and not self._shared.needs_host(packed.rows[packed.sampling])

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        shared = self._shared
        rows = packed.rows[packed.sampling]
        errors = shared.refusals(rows)
        wait = self._draw(packed, rows)
        launch = shared.rows.launch(packed)

        def read() -> StepResult:
            tokens, device_us = wait()
            sampled = Sampled.of(tokens)
            shared.rows.read(packed, sampled.tokens, launch)
            return shared.result(step.step, step.incarnation, rows, sampled, errors, device_us)

        pending = Pending(read)
        shared.in_flight.add(pending)
        return pending

    def _draw(self, packed: PackedStep, rows: NDArray[np.int32]) -> Callable[[], tuple[NDArray[Any], int]]:
        """Launch the pass and the draw. Returns what waits for the tokens, and for the time that they took in us."""
        device = self._shared.backend.device
        began = Mark(device)
        with torch.inference_mode():
            logits = self._shared.backend.logits(self._batch(packed))
            tokens = self._shared.sampler.sample_ahead(logits[: len(rows)], rows, packed.positions)
            self._last_tokens.index_copy_(0, upload(rows.astype(np.int64), device), tokens.clamp(min=0))
            copied = Download(tokens)
        return lambda: (copied.wait(), copied.done.us_since(began))

    def _batch(self, packed: PackedStep) -> ForwardBatch:
        """Make the forward's input, with tokens that only the device has."""
        batch = self._shared.batch(packed)
        places, rows = self._shared.rows.unread(packed)
        if not len(places):
            return batch
        where, owners = upload_together((places, rows), np.int64, self._shared.backend.device)
        return replace(batch, tokens=batch.tokens.index_copy(0, where, self._last_tokens[owners]))
