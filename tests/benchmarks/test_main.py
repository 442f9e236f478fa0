"""The whole command against a real server process, which it also starts and stops; and what it says when that fails."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks import server
from benchmarks.__main__ import main
from deploy.bench.metrics import DEFINITIONS
from tests.benchmarks import sse_server

SMALL = ["--requests", "6", "--concurrency", "3", "--prompt-tokens", "8", "--output-tokens", "3", "--warmup", "2"]


def _only_script(script: int) -> list[str]:
    return ["--first-token-id", str(script), "--last-token-id", str(script)]


def _scripted_command(port: int, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tests.benchmarks.sse_server", str(port), *flags]


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "serve_command", _scripted_command)


@pytest.mark.usefixtures("own_server")
def test_a_benchmark_with_a_server_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children())
    arguments = [*SMALL, *_only_script(sse_server.STEADY), "--repeats", "2", "--seed", "5", "--out", str(tmp_path)]
    assert main([*arguments, "--", "--max-running", "4"]) == 0
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert [run["workload"]["seed"] for run in report["runs"]] == [5, 6]
    for run in report["runs"]:
        assert (run["metrics"]["completed"], run["metrics"]["failures"], run["metrics"]["output_tokens"]) == (6, {}, 18)
        assert run["metrics"]["itl"]["samples"] == 12
        assert run["metrics"]["ttft"]["p50"] >= sse_server.FIRST_S * 0.95
    assert report["definitions"] == DEFINITIONS
    assert report["conditions"]["model"] == "scripted"
    assert report["conditions"]["server_command"][-2:] == ["--max-running", "4"]
    assert next(tmp_path.glob("*.png")).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("output tok/s", "TTFT p99", "ITL p50", "TPOT mean", "client CPU"))
    left = set(psutil.Process().children()) - before
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.usefixtures("own_server")
def test_failures_are_reported_and_make_the_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *_only_script(sse_server.BUSY), "--out", str(tmp_path)]) == 1
    assert "6 x HTTP 429" in capsys.readouterr().out
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["runs"][0]["metrics"]["failures"] == {"HTTP 429": 6}


def test_a_server_that_dies_at_the_start_is_shown_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = [sys.executable, "-c", "import sys; print('no such model: x'); sys.exit(3)"]
    monkeypatch.setattr(server, "serve_command", lambda port, flags: dying)
    assert main([*SMALL, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "ended with exit code 3" in said
    assert "no such model: x" in said


def test_waiting_for_a_server_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(server.ServerError, match=r"not ready after 0\.5 s"):
        asyncio.run(server.wait_until_ready(f"http://127.0.0.1:{server.free_port()}", None, None, 0.5))


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_S", 0.5)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    with server.running([sys.executable, "-c", stubborn], log) as process:
        while not log.read_text():
            assert process.poll() is None
    assert process.returncode == -9


def test_flags_for_a_server_that_is_not_started_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--url", "http://127.0.0.1:1", "--", "--max-running", "4"])
    assert "leave out --url" in capsys.readouterr().err
