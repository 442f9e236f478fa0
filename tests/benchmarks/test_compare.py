"""The comparison as a whole, ours against ours on the tiny model: that every figure, ratio and file comes out.

Nothing here says how fast anything is.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import compare
from benchmarks.cells import DISTURBED, OVERHEAD, PER_CPU, RATE, REUSE, TEXTS, TEXTS_PER_CPU
from benchmarks.contenders import OURS
from benchmarks.encoder_words import AROUND

AGAIN = "ours again"
WORKS = ("W1", "W4", "W6")
"""One of each kind: the others differ from W1 in numbers only."""
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a comparison that has been made, on one thread."""
    out = tmp_path_factory.mktemp("comparison")
    before = living_children()
    arguments = ["--peer", OURS, "--work", ",".join(WORKS), "--short", "--threads", "1"]
    places = ["--cache", str(out / "cache"), "--out", str(out)]
    assert compare.main([*arguments, *places, "--", "--kv-memory", "64MB", "--max-batch-tokens", "512"]) == 0
    assert living_children() == before
    return out


def living_children() -> set[psutil.Process]:
    """Other tests' servers may be among them."""
    return {child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(scope="module")
def report(folder: Path) -> Any:
    return json.loads(next(folder.glob("*.json")).read_text())


@pytest.mark.parametrize("work", WORKS)
def test_a_work_has_its_figures_and_ratios(report: Any, work: str) -> None:
    entries = {(entry["server"], entry["figure"]): entry for entry in report["summary"] if entry["work"] == work}
    wanted = [RATE, PER_CPU, *([REUSE] if work == "W4" else []), *([DISTURBED] if work == "W6" else [])]
    for figure in wanted:
        ours, again = entries[OURS, figure], entries[AGAIN, figure]
        assert min(ours["median"], again["median"]) > 0
        assert "ours over it" not in ours
        if figure != REUSE:
            assert math.isclose(again["ours over it"]["median"], ours["median"] / again["median"])


def test_every_request_is_accounted_for(report: Any) -> None:
    turns = [(cell["work"], cell["server"], cell["round"]) for cell in report["cells"]]
    assert turns == [(work, server, 1) for work in WORKS for server in (OURS, AGAIN)]
    for cell in report["cells"]:
        assert cell["failures"] == {}
        metrics, workload = cell["metrics"], cell["workload"]
        prompt = workload["shared_prefix"] + workload["prompt_tokens"]
        assert metrics["output_tokens"] == metrics["completed"] * workload["output_tokens"]
        assert metrics["prompt_tokens"] == metrics["completed"] * prompt


def test_texts_on_an_encoder_have_figures_of_their_own(tmp_path: Path) -> None:
    arguments = ["--peer", OURS, "--work", "E1/32", "--short", "--threads", "1", "--out", str(tmp_path)]
    assert compare.main([*arguments, "--cache", str(tmp_path / "cache")]) == 0
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    figures = {(entry["server"], entry["figure"]): entry["median"] for entry in report["summary"]}
    wanted = (TEXTS, TEXTS_PER_CPU, OVERHEAD, "latency p50, ms")
    assert min(figures[server, figure] for server in (OURS, AGAIN) for figure in wanted) > 0
    assert (OURS, RATE) not in figures
    for cell in report["cells"]:
        assert cell["failures"] == {}
        tokens = cell["workload"]["prompt_tokens"] + AROUND
        assert cell["metrics"]["prompt_tokens"] == cell["metrics"]["completed"] * tokens


def test_there_are_plots(folder: Path) -> None:
    plots = list(folder.glob("*.png"))
    assert len(plots) == 2
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)


def test_a_missing_peer_is_skipped_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--peer", "vllm", "--cache", str(tmp_path), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "vllm is skipped" in said.out
    assert "make peer PEER=vllm" in said.out
    assert "no peer to compare with" in said.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--peer", "vlm"], "got 'vlm'"),
        (["--peer", OURS, "--work", "W1,W7"], "got W7"),
        (["--peer", "http://127.0.0.1:1"], "WORK=W1,W2,W3,W4,W6 or WORK=E1,E2,E3 or WORK=W5"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([*arguments, "--cache", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert complaint in capsys.readouterr().err
