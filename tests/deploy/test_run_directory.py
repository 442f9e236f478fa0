"""The private run directory: modes, removal, and the sweep after a supervisor that was killed."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.run_directory import living_run_directories, parent_directory, places_to_look, private_run_directory
from shared.settings import SettingsError

OWNER = """
import sys, time
from pathlib import Path
from deploy.run_directory import private_run_directory
with private_run_directory(Path(sys.argv[1])) as directory:
    (directory.path / "api.sock").touch()
    print(directory.path, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


def start_owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_it_is_private_and_goes_away(parent: Path) -> None:
    with private_run_directory(parent) as directory:
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        assert directory.metrics_directory.is_dir()
        assert (directory.path / "supervisor.pid").read_text() == f"{os.getpid()}\n"
    assert list(parent.iterdir()) == []


def test_it_goes_away_when_the_work_fails(parent: Path) -> None:
    with pytest.raises(ZeroDivisionError), private_run_directory(parent):
        raise ZeroDivisionError
    assert list(parent.iterdir()) == []


def test_that_of_a_killed_supervisor_is_swept_and_that_of_a_living_one_is_not(parent: Path) -> None:
    dead, dead_path = start_owner(parent)
    living, living_path = start_owner(parent)
    try:
        dead.kill()
        dead.wait()
        assert dead_path.is_dir()
        with private_run_directory(parent):
            assert not dead_path.exists()
            assert (living_path / "api.sock").exists()
    finally:
        living.kill()
        living.wait()


def test_what_is_not_ours_is_left_alone(parent: Path) -> None:
    foreign = parent / "tokenyard-notes"
    foreign.mkdir()
    (foreign / "diary.txt").write_text("dear diary")
    half_made, old = parent / "tokenyard-young", parent / "tokenyard-old"
    half_made.mkdir()
    old.mkdir()
    for path in (foreign, old):
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    with private_run_directory(parent):
        assert foreign.exists()
        assert half_made.exists()
        assert not old.exists()


def test_a_parent_too_long_for_sockets_is_explained(parent: Path) -> None:
    deep = parent / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with pytest.raises(SettingsError, match="too long for a socket path; set TMPDIR"), private_run_directory(deep):
        pass
    assert list(deep.iterdir()) == []


def test_a_parent_that_is_missing_is_explained(parent: Path) -> None:
    missing = parent / "missing"
    with pytest.raises(SettingsError, match=r"no run directory can be made in .*/missing: No such file"):
        private_run_directory(missing).__enter__()


def test_the_parent_is_tmpdir_else_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parent_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path
    default = parent_directory({})
    assert parent_directory({"XDG_RUNTIME_DIR": str(tmp_path / "gone")}) == default
    assert parent_directory({"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(default)}) == default


def test_a_tmpdir_that_cannot_be_used_is_not_replaced_in_silence(tmp_path: Path) -> None:
    assert parent_directory({"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": "/no/such/place"}) == Path("/no/such/place")


def test_servers_are_looked_for_wherever_they_may_have_been_started(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": "/somewhere"}
    assert places_to_look(environ) == [Path("/somewhere"), tmp_path, Path("/tmp"), Path("/run/tokenyard")]
    unit = (Path(__file__).parents[2] / "deploy" / "systemd" / "tokenyard.service").read_text()
    assert "TMPDIR=%t/tokenyard" in unit
    assert "RuntimeDirectory=tokenyard\n" in unit


def test_living_ones_are_found_and_others_users_by_root_alone(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_run_directory(parent) as directory:
        assert living_run_directories([parent, parent / "missing"]) == [directory]
        stranger = directory.path.stat().st_uid + 1
        monkeypatch.setattr("os.getuid", lambda: stranger)
        assert living_run_directories([parent]) == []
        monkeypatch.setattr("os.getuid", lambda: 0)
        assert living_run_directories([parent]) == [directory]
    assert living_run_directories([parent]) == []


def test_a_full_file_system_is_explained(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fcntl.flock", full)
    with pytest.raises(SettingsError, match="No space left on device; set TMPDIR"):
        private_run_directory(parent).__enter__()
    assert list(parent.iterdir()) == []
