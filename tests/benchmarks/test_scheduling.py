"""The scheduler's cost is measured on the real process, with a worker that it takes for a local one."""

from __future__ import annotations

import pytest

from benchmarks.scheduling import main


def test_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "4", "--steps", "50"]) == 0
    *_, row, _ = capsys.readouterr().out.splitlines()
    figures = [int(word) for word in row.replace("│", " ").split()]
    assert figures[0] == 4
    assert len(figures) == 5
    assert figures[1] > 0
