"""Live figures of several API processes: each is seen by the others while it lives."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_server.metrics import replicas
from api_server.metrics.live import LiveFigures
from api_server.metrics.replicas import ReplicaFiles
from tests.api_server.conftest import LiveServer


def figures(name: str, generated: int = 0) -> dict[str, Any]:
    return {"replica": name, "pid": os.getpid(), "time": time.time(), "totals": {"generated": generated}}


def put(folder: Path, pid: int, content: str) -> Path:
    """A file as the process `pid` would write it."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{pid}.json"
    file.write_text(content)
    return file


def test_a_process_sees_itself_and_those_that_live(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = put(folder, ended.pid, json.dumps(figures("c")))
    put(folder, os.getppid(), json.dumps(figures("a", 7)))
    files = ReplicaFiles(folder, lambda: figures("b", 5))
    assert [(one["replica"], one["totals"]["generated"]) for one in files.all()] == [("a", 7), ("b", 5)]
    assert not left.exists()
    assert json.loads((folder / f"{os.getpid()}.json").read_text())["replica"] == "b"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "\x00"])
def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path, content: str) -> None:
    put(tmp_path, os.getppid(), content)
    put(tmp_path, 0, "").rename(tmp_path / "strange.json")
    assert [one["replica"] for one in ReplicaFiles(tmp_path, lambda: figures("b")).all()] == ["b"]


def test_without_a_folder_or_a_place_to_write_it_knows_itself(tmp_path: Path) -> None:
    assert [one["replica"] for one in ReplicaFiles(None, lambda: figures("b")).all()] == ["b"]
    (tmp_path / "file").touch()
    files = ReplicaFiles(tmp_path / "file" / "live", lambda: figures("b"))
    assert [one["replica"] for one in files.all()] == ["b"]


def test_changes_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "WRITE_SECONDS", 0.01)
    asked: list[int] = []

    def own() -> dict[str, Any]:
        asked.append(1)
        return figures("b", len(asked))

    async def run() -> None:
        files = ReplicaFiles(tmp_path, own)
        for _ in range(100):
            files.changed()
        async with asyncio.timeout(30):
            while _written(tmp_path) < 2:  # noqa: ASYNC110 (another process would look like this, too)
                await asyncio.sleep(0.005)

    asyncio.run(run())
    # Once at the start, and once for all changes.
    assert len(asked) == 2


def _written(folder: Path) -> int:
    return int(json.loads((folder / f"{os.getpid()}.json").read_text())["totals"]["generated"])


def test_the_route_has_all_processes(live: LiveServer, tmp_path: Path) -> None:
    httpx.post(live.url + "/v1/completions", json={"prompt": "Hello"}).raise_for_status()
    shown = httpx.get(live.url + "/live").json()
    (own,) = shown["replicas"]
    assert own["replica"] == shown["replica"]
    assert own["totals"] == shown["totals"]
    assert own["totals"]["generated"] > 0
    assert own["pid"] == os.getpid()
    assert own["first_token_ms"] == shown["first_token_ms"]


def test_old_waits_of_others_are_not_recent_ones(live: LiveServer, tmp_path: Path) -> None:
    waits = {"p50": 1.0, "p99": 2.0}
    other = {**figures("a"), "first_token_ms": waits, "between_tokens_ms": waits}
    live.state.live_folder = tmp_path / "live"
    watched = LiveFigures(live.state)
    for age, seen in ((0, waits), (60, None)):
        put(tmp_path / "live", os.getppid(), json.dumps({**other, "time": time.time() - age}))
        found = next(one for one in watched.of_all_processes() if one["replica"] == "a")
        assert (found["first_token_ms"], found["between_tokens_ms"]) == (seen, seen)
