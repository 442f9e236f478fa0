"""Ranks do together what all of them can: the first step that one of them cannot record is the last of all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, local
from typing import Any

import pytest
import torch
from torch import Tensor

from model_worker.agreement import together
from model_worker.backends import modules
from model_worker.loading.load import load_model
from model_worker.runner import ModelRunner
from tests.model_worker.tiny_models import tiny_model

RANKS = 2
SECONDS = 60.0
Step = Callable[[], Tensor]


class Hosts:
    """What ranks that are threads tell each other."""

    def __init__(self) -> None:
        self._come = Barrier(RANKS, timeout=SECONDS)
        self._answers = [True] * RANKS

    def agreed(self, rank: int) -> Callable[[bool], bool]:
        def ask(here: bool) -> bool:
            self._answers[rank] = here
            self._come.wait()
            answer = all(self._answers)
            self._come.wait()
            return answer

        return ask


def on_all(work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(work, range(RANKS)))


def test_an_error_of_one_rank_is_one_of_all() -> None:
    hosts = Hosts()

    def attempt(rank: int) -> str:
        def fails() -> str:
            if rank == 1:
                raise RuntimeError("no such driver")
            return "done"

        try:
            return together(hosts.agreed(rank), fails)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"

    assert on_all(attempt) == [
        "NotEverywhere: it fails on another rank, whose log says why",
        "RuntimeError: no such driver",
    ]
    assert together(None, lambda: "alone") == "alone"
    assert on_all(lambda rank: together(hosts.agreed(rank), lambda: rank)) == [0, 1]


class Recorder:
    """Records nothing, and counts; fails at the step after so many."""

    def __init__(self, most: int, error: RuntimeError) -> None:
        self.count = 0
        self._most = most
        self._error = error

    def __call__(self, step: Step) -> Step:
        self.count += 1
        if self.count > self._most:
            raise self._error
        return step


@pytest.mark.parametrize("error", [RuntimeError("it waits for the device"), torch.OutOfMemoryError("no memory")])
def test_ranks_record_the_same_steps_or_none(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(tiny_model("llama", tmp_path), "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False)
    backends: list[Any] = [ModelRunner(loaded, 8, 4, "reference").backend for _ in range(RANKS)]
    recorders = [Recorder(99, error), Recorder(2, error)]
    own = local()
    monkeypatch.setattr(modules, "CudaRecorder", lambda: own.recorder)
    hosts = Hosts()

    def record(rank: int) -> bool:
        own.recorder = recorders[rank]
        try:
            backends[rank].record(16, 64, 0, 7, hosts.agreed(rank))
        except torch.OutOfMemoryError:
            assert rank == 1
        return bool(backends[rank].records)

    assert on_all(record) == [False, False]
    assert [recorder.count for recorder in recorders] == [3, 3]
    assert "it fails on another rank" in caplog.text
