"""Where the processes meet."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.endpoints import RunDirectory


def test_everything_lies_inside_the_run_directory(tmp_path: Path) -> None:
    run = RunDirectory(Path("/tmp/run"))
    assert {run.api_endpoint, run.worker_endpoint} == {"ipc:///tmp/run/api.sock", "ipc:///tmp/run/workers.sock"}
    assert run.settings_file.parent == run.metrics_directory.parent == run.path


@given(st.integers(1, 200))
def test_a_path_is_accepted_exactly_when_its_sockets_fit(length: int) -> None:
    path = Path("/" + "d" * length)
    if len(f"{path}/workers.sock") <= 107:
        assert RunDirectory(path).path == path
    else:
        with pytest.raises(ValueError, match="set TMPDIR to a shorter one"):
            RunDirectory(path)


def test_the_longest_accepted_path_can_be_bound() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        path = Path(base) / ("d" * (107 - len(base) - len("//workers.sock")))
        path.mkdir()
        endpoint = RunDirectory(path).worker_endpoint.removeprefix("ipc://")
        assert len(endpoint) == 107
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(endpoint)
