"""A rank that is lost while its group starts says why it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_worker.tensor_parallel import start
from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.tensor_parallel.links import Leader, Place
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.model_worker.tiny_models import tiny_model

SECONDS = 120.0


def test_a_rank_that_is_refused_says_why(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tiny_model("llama", tmp_path_factory.mktemp("model"))
    settings = Settings(model=str(model), tensor_parallel=2, dtype="float32")
    RunDirectory(tmp_path).settings_file.write_text(json.dumps(asdict(settings)))
    command = [sys.executable, "-m", "model_worker", "--run-dir", str(tmp_path), "--rank", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as rank:
        with pytest.raises(GroupLost, match="rank 1 has dtype 'float32', and rank 0 has 'bfloat16'"):
            Leader(Place(tmp_path / "group-0.sock", 0, 2, 0, {"dtype": "bfloat16"}), 1 << 10, SECONDS)
        said, _ = rank.communicate(timeout=SECONDS)
    assert rank.returncode == 1, said
    assert "this worker ends: " in said
    assert "Traceback" not in said


def test_a_rank_that_is_asked_to_end_computes_on_until_rank_0_has_ended() -> None:
    """Rank 0 may have sent batches whose sums it waits for."""
    messages = [b"one", None, b"two", None, None]
    losses = [None, None, GroupLost("rank 0 ends: it was asked to end", blamed=False)]
    left: list[bool] = []
    rank: Any = object.__new__(start.Rank)
    rank._serves = False
    rank._link = SimpleNamespace(receive=lambda _: messages.pop(0))
    rank._ties = SimpleNamespace(trouble=lambda: losses.pop(0), leave=lambda: left.append(True))
    rank._on_sigterm()
    assert left == [True], "rank 0 is told"
    assert [rank._next(), rank._next()] == [b"one", b"two"]
    with pytest.raises(GroupLost, match="rank 0 ends"):
        rank._next()


def test_a_rank_without_memory_says_so_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` reports errors of what makes a rank, as it does those of rank 0."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory for K and V")

    terms = SimpleNamespace(receive=lambda _: b'{"num_blocks": 1, "block_size": 1}')
    ties = SimpleNamespace(joining=None, agreed=None, apart=None)
    monkeypatch.setattr(start, "follow_here", lambda *_: (terms, ties))
    monkeypatch.setattr(start, "load_part", lambda *_: None)
    monkeypatch.setattr(start, "ModelRunner", full)
    settings = Settings(model=str(tiny_model("llama", tmp_path)), tensor_parallel=2)
    with pytest.raises(torch.OutOfMemoryError):
        start.Rank(settings, tmp_path, 0, 0, 1, "cpu", 1)
