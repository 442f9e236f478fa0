"""The private directory of one running server: made at start, removed at the end, swept when its owner was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from deploy import credentials
from shared.endpoints import RunDirectory
from shared.settings import Settings, SettingsError

# TMPDIR of the systemd unit that we ship.
SERVICE_DIRECTORY = Path("/run/tokenyard")
_PREFIX = "tokenyard-"
_PID_FILE = "supervisor.pid"
_SECONDS_TO_MAKE_ONE = 60.0


def parent_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where run directories are made: TMPDIR when it is set, else the user's runtime directory, else /tmp."""
    if environ.get("TMPDIR"):
        # Not tempfile's choice, which goes on elsewhere in silence when this one cannot be used.
        return Path(environ["TMPDIR"]).absolute()
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) if os.access(runtime, os.W_OK | os.X_OK) else Path("/tmp")


def places_to_look(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return where servers may have their run directories, however each was started, the systemd unit's included."""
    mine = [Path(environ[name]) for name in ("TMPDIR", "XDG_RUNTIME_DIR") if environ.get(name)]
    return list(dict.fromkeys([*mine, Path("/tmp"), SERVICE_DIRECTORY]))


@contextlib.contextmanager
def private_run_directory(parent: Path) -> Iterator[RunDirectory]:
    """Make a fresh 0700 directory, removed at the end. SettingsError gives the reason when none can be made."""
    _sweep(parent)
    path = _make(parent)
    try:
        directory = _described(path)
        with _prepared(directory):
            yield directory
    finally:
        shutil.rmtree(path, ignore_errors=True)


def keep_settings(directory: RunDirectory, settings: Settings) -> None:
    """Write the settings that every process of the server reads. SettingsError when there is no room."""
    try:
        credentials.write(settings, directory)
    except OSError as error:
        raise SettingsError(_unusable(directory.path.parent, error)) from None


def _prepared(directory: RunDirectory) -> TextIO:
    try:
        directory.metrics_directory.mkdir()
        return _claim(directory.path)
    except OSError as error:
        raise SettingsError(_unusable(directory.path.parent, error)) from None


def _unusable(parent: Path, error: OSError) -> str:
    return f"no run directory can be made in {parent}: {error.strerror}; set TMPDIR to a writable one with room"


def living_run_directories(parents: Iterable[Path]) -> list[RunDirectory]:
    """Return the run directories of this user's running servers; for root, those of all users."""
    found = []
    for path in (path for parent in parents for path in sorted(parent.glob(f"{_PREFIX}*"))):
        with contextlib.suppress(OSError):
            mine = os.getuid() in (0, path.stat().st_uid)
            if mine and (path / _PID_FILE).is_file() and not _is_abandoned(path):
                found.append(RunDirectory(path))
    return found


def _make(parent: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise SettingsError(_unusable(parent, error)) from None


def _described(path: Path) -> RunDirectory:
    try:
        return RunDirectory(path)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _claim(path: Path) -> TextIO:
    """Write the pid file and lock it. The lock, not the number, shows that the owner lives: it ends with the process.

    The file gets its name only when it is locked, so that a sweep never meets an unlocked pid file of a living owner.
    """
    unnamed = path / f"{_PID_FILE}.new"
    file = unnamed.open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write(f"{os.getpid()}\n")
    file.flush()
    unnamed.rename(path / _PID_FILE)
    return file


def _sweep(parent: Path) -> None:
    """Remove the directories that killed supervisors of this user left behind."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_dir() and path.stat().st_uid == os.getuid() and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    try:
        with (path / _PID_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        # Only one of ours has a metrics folder or nothing at all; a young one may be in the making.
        young = time.time() - path.stat().st_mtime < _SECONDS_TO_MAKE_ONE
        return not young and {entry.name for entry in path.iterdir()} <= {"metrics", f"{_PID_FILE}.new"}
