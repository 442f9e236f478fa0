"""`tokenyard status`: what it reports of a server with several models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy import status
from shared import process_table
from shared.endpoints import RunDirectory
from shared.process_table import ProcessState


def test_hangs_and_deaths_of_further_models_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not the folder itself: other tests have files beside it.
    first = RunDirectory(tmp_path / "run")
    first.path.mkdir()
    further = first.of_further_model(0)
    further.path.mkdir()
    for place, name in ((first, "chat"), (further, "embed")):
        place.settings_file.write_text(json.dumps({"served_model_name": name, "model": "/m", "devices": "cpu"}))
    hangs = {"model_worker:0": 1, "model_worker:embed:0": 2, "scheduler": 3, "scheduler:embed": 4}
    process_table.write(first.processes_file, {name: ProcessState(hangs=count) for name, count in hangs.items()})
    first.deaths_file.write_text("model_worker:embed:0 (cpu) died\n")
    found = [status._Process(1, role, "", 0.0, 0, 0.0) for role in ("model_worker:0 cpu", "scheduler")]
    monkeypatch.setattr(status, "_processes", lambda _: found)
    monkeypatch.setattr(status, "ask", lambda *_: None)
    reports = [status._report(place) for place in (first, further)]
    assert [[process.hangs for process in report.processes] for report in reports] == [[1, 3], [2, 4]]
    assert [report.deaths for report in reports] == [["model_worker:embed:0 (cpu) died"]] * 2
