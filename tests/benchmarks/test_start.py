"""The benchmark of starts against a scripted server, and against one that dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import server
from benchmarks.start import main

SUMMARY = "  model_worker:0  start python 0.4s | import 3.0s | ready 5.1s  (attention cpu)"


def test_each_start_is_timed_and_the_phases_of_one_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = "import runpy; runpy.run_module('tests.benchmarks.sse_server', run_name='__main__')"
    script = f"print({SUMMARY!r}, flush=True); {serve}"
    monkeypatch.setattr(server, "serve_command", lambda port, flags: [sys.executable, "-c", script, str(port)])
    assert main([str(tmp_path), "--repeats", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("ours: ") == 2
    assert "import 3.0s | ready 5.1s" in said


def test_a_server_that_dies_is_shown_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = [sys.executable, "-c", "import sys; print('no such model: x'); sys.exit(3)"]
    monkeypatch.setattr(server, "serve_command", lambda port, flags: dying)
    with pytest.raises(SystemExit, match=r"(?s)exit code 3.*no such model: x"):
        main([str(tmp_path)])
