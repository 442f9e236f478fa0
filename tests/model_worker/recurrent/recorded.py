"""Recorded steps of a model with recurrent layers, on a CPU: a replay calls again what was to be recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from model_worker import runner as runner_module
from model_worker.attention import reference
from model_worker.backends import modules
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from tests.model_worker.test_runner import BLOCK_SIZE

LONGEST = 256


def recording(
    loaded: LoadedModel, blocks: int, rows: int, patch: pytest.MonkeyPatch
) -> tuple[ModelRunner, list[Tensor]]:
    """Make a runner that records decode steps, with attention in plain torch. Returns it and what replays give."""
    replays: list[Tensor] = []

    def record(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Recording runs it, too.
        function()

        def replay() -> Tensor:
            replays.append(function())
            return replays[-1]

        return replay

    patch.setattr(modules, "CudaRecorder", lambda: record)
    for module in (modules, runner_module):
        patch.setattr(module, "RECORDABLE", (reference.attend,))
    runner = ModelRunner(loaded, blocks, BLOCK_SIZE, "reference", max_rows=rows)
    runner.record(rows, LONGEST, 32)
    assert runner.records
    return runner, replays
