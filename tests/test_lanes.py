"""The table of lanes names files and folders that are there, and the longest path decides."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path, PurePath

import pytest

from tests import lanes

TESTS = Path(__file__).parent


@pytest.mark.parametrize("place", [*lanes.PLACES, *lanes.SLOW])
def test_every_place_is_there(place: str) -> None:
    assert (TESTS / place).exists()


@pytest.mark.parametrize(
    ("path", "lane"),
    [
        ("api_server/http/test_tls.py", lanes.API),
        ("test_lanes.py", lanes.API),
        ("model_worker/cpu/test_softmax.py", lanes.KERNELS),
        ("system/test_tools.py", lanes.SERVING),
        ("system/test_drafts.py", lanes.SYSTEM),
        ("deploy/test_offline_pooling.py", lanes.KERNELS),
    ],
)
def test_the_lane_of_a_file(path: str, lane: str) -> None:
    assert lanes.lane_of(PurePath(path)) == lane


def test_slow_files_are_named_by_themselves_or_by_their_folder() -> None:
    assert lanes.is_slow(PurePath("api_server/test_process.py"))
    assert lanes.is_slow(PurePath("model_worker/tensor_parallel/test_equality.py"))
    assert not lanes.is_slow(PurePath("api_server/test_access_log.py"))


def test_the_cold_start_is_the_first_test() -> None:
    files = ("api_server/test_process.py", "model_worker/test_variants.py", "system/test_tools.py", lanes.COLD_START)
    in_order = sorted(map(PurePath, files), key=lanes.place_in_lane)
    assert str(in_order[0]) == lanes.COLD_START
    assert in_order[-1].name == "test_variants.py"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["test", "test-fast"])
@pytest.mark.parametrize(("statuses", "passes"), [((5, 5), False), ((0, 5), True), ((5, 0), True), ((0, 1), False)])
def test_make_fails_where_no_lane_has_a_test(
    tmp_path: Path, target: str, statuses: tuple[int, int], passes: bool
) -> None:
    """A program in Python's place ends as pytest would: with one status for the lane `api`, another for the others."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    ends = "\n".join(f"  {lane}) exit {status} ;;" for lane, status in zip(("api", "*"), statuses, strict=True))
    python.write_text(f'#!/bin/sh\ncase "$4" in\n{ends}\nesac\n')
    python.chmod(0o755)
    (tmp_path / ".installed-test").touch()
    # This test may run below make itself, whose options are not those of this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", target, f"VENV={tmp_path}", "ARGS=-k nothing"]
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode == 0) is passes, done.stderr
    assert ("no test was run" in done.stderr) is (statuses == (5, 5))
