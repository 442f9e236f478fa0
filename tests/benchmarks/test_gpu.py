"""The benchmark for GPUs runs without one, and says when it needs one."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import gpu


def test_it_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--size", "tiny", "--concurrency", "1", "3", "--prompt", "20", "--output", "6"]
    assert gpu.main([*arguments, "--sampled"]) == 0
    shown = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in shown
    assert re.search(r"│ reference\s+│ \d\.\d\de-0\d\s+│ \d+\.\d%", shown), shown
    assert re.search(r"│ cpu\s+│ \d\.\d\de-0\d\s+│", shown), shown
    for rows in (1, 3):
        assert re.search(rf"│ {rows}\s+│ \d+\s+│ \d+\.\d\d\s+│ \d+\.\d%", shown), shown


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_wrong_logits_are_noticed() -> None:
    reference = gpu.Check("reference", 0.01, 0.9)
    assert not gpu.disagree(reference, gpu.Check("cuda", 0.012, 0.9))
    assert gpu.disagree(reference, gpu.Check("cuda", 0.02, 0.9))
    assert gpu.disagree(reference, gpu.Check("cuda", float("nan"), 0.0))
