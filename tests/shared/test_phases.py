"""What a child tells its supervisor while it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from shared import phases


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    read, write = os.pipe()
    monkeypatch.setenv(phases.STATUS_FD, str(write))
    yield read
    for descriptor in (read, write):
        try:
            os.close(descriptor)
        except OSError:
            continue


def test_each_event_is_one_json_line(pipe: int) -> None:
    phases.phase("load weights")
    phases.progress(3, 10, "tensors")
    phases.ready(blocks=7)
    phases.fatal("wrong model\nsecond line")
    assert [json.loads(line) for line in os.read(pipe, 65536).splitlines()] == [
        {"event": "phase", "name": "load weights"},
        {"event": "progress", "done": 3, "total": 10, "unit": "tensors"},
        {"event": "ready", "blocks": 7},
        {"event": "fatal", "message": "wrong model\nsecond line", "may_pass": False},
    ]


def test_without_a_supervisor_events_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(phases.STATUS_FD, raising=False)
    phases.phase("import")


def test_a_supervisor_that_went_away_does_no_harm(pipe: int) -> None:
    os.close(pipe)
    phases.phase("import")
    phases.phase("load weights")
    assert phases.STATUS_FD not in os.environ


def test_a_variable_that_is_no_descriptor_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(phases.STATUS_FD, "three")
    phases.ready()
