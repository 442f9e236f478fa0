"""The benchmark for GPUs runs without one, and says when it needs one."""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_host, gpu_hour, gpu_repeats, gpu_sanitized
from model_worker.sampling.draw_triton import TritonDraw
from tests.model_worker.cuda.interpreter import FOLDER, find_triton, need_triton


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


def test_the_whole_hour_can_be_pretended(tmp_path: Path) -> None:
    find_triton()
    assert gpu.main(["--all", "--pretend", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert list(results) == [part.__name__ for part in gpu_hour.PARTS]
    assert not any("failed" in figures for figures in results.values())
    assert results["throughput"]["drawn tok/s, 2 rows"] > 0
    assert results["mixed_steps"]["ratio"] > 0
    assert results["faults"]["the same tokens in parts"]
    if "skipped" not in results["attention"]:
        assert results["attention"]["cases"] == 4
        assert results["attention"]["wrong"] == []
        assert results["drawing"]["draws torch's tokens"]
        assert results["repeated"]["wrong"] == []
        assert (results["repeated"]["launches of each"], results["repeated"]["cases"]) == (2, 6)
        assert results["products"]["wrong"] == []
        assert results["products"]["kinds that are right"] == 9
        assert results["products"]["experts in four bits, 1 tokens, us"] > 0
        costs = [value for name, value in results["host"].items() if name != "seconds"]
        assert len(costs) == len(gpu_host.KINDS)
        assert all(re.fullmatch(r"[1-9]\d* \+ [1-9]\d*", cost) for cost in costs)
    shown = (tmp_path / "gpu.md").read_text()
    assert "figures mean nothing" in shown
    assert "## mixed steps" in shown


SANITIZER = """#!/bin/sh
# Takes the options of compute-sanitizer, and runs what it is to watch.
[ "$1 $3 $4" = "--tool --error-exitcode 9" ] || exit 3
tool=$2
shift 4
case "$tool $4" in "racecheck four-bits") echo "ERROR SUMMARY: 2 hazards"; exit 9;; esac
exec "$@"
"""


def test_what_a_sanitizer_finds_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_triton()
    cases = {name: gpu_sanitized.CASES[name] for name in ("four-bits", "adapters")}
    monkeypatch.setattr(gpu_sanitized, "CASES", cases)
    (tmp_path / "compute-sanitizer").write_text(SANITIZER)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=":")
    out = tmp_path / "out"
    assert gpu.main(["--all", "--pretend", "--parts", "sanitizer", "--out", str(out)]) == 1
    found = json.loads((out / "gpu.json").read_text())["sanitizer"]
    assert found["adapters, memcheck"] == found["adapters, racecheck"] == found["four-bits, memcheck"] == "clean"
    assert found["wrong"] == ["four-bits, racecheck: ended with 9: ERROR SUMMARY: 2 hazards"]


def test_a_launch_that_differs_once_is_noticed() -> None:
    calls = count()
    cases = {"right": lambda: torch.ones(4), "racy": lambda: torch.tensor([2, int(next(calls) == 150)])}
    repeats = gpu_repeats.REPEATS
    assert gpu_repeats.unequal(cases, repeats) == [f"racy: 1 of {repeats} results differ"]


def test_a_draw_for_the_sanitizer_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    need_triton()
    cpu = torch.device("cpu")
    monkeypatch.setattr(gpu_sanitized, "DRAWN_WIDTH", 96)
    assert gpu_sanitized.CASES["draw"](cpu) == ""
    draw = TritonDraw.draw
    monkeypatch.setattr(TritonDraw, "draw", lambda self, logits, step: draw(self, -logits, step))
    assert gpu_sanitized.CASES["draw"](cpu) == "the kernels draw other tokens"


def test_without_a_sanitizer_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu_sanitized.watched(torch.device("cpu")) == {"skipped": "compute-sanitizer is not on the path"}


def test_a_part_that_fails_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(hour: gpu_hour.Hour) -> gpu_hour.Figures:
        """A part."""
        raise RuntimeError(f"no kernel image for {hour.device}")

    monkeypatch.setattr(gpu_hour, "PARTS", (broken, gpu_hour.machine))
    assert gpu.main(["--all", "--pretend", "--out", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["broken"]["failed"] == "RuntimeError: no kernel image for cpu"
    assert results["machine"]["torch"] == torch.__version__
    assert "| failed | RuntimeError: no kernel image for cpu |" in (tmp_path / "gpu.md").read_text()


def test_pretending_belongs_to_the_hour(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--pretend"])
    assert "--pretend belongs to --all" in capsys.readouterr().err
