"""A server or a worker that ends with the process that started it: `python -m deploy.ray_child`, told by its input.

The input is JSON: `arguments` of the command line, `environment` in which settings and secrets lie (neither a list of
processes nor an argument shows them), and `keys`, the files of a worker's CURVE folder by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shared.liveness import SUPERVISOR_PID, end_with_parent, orphaned

_PREFIX = "tokenyard-keys-"
# Seconds in which a folder that was made is locked.
_SECONDS_TO_LOCK = 60.0


def start(
    arguments: Sequence[str], environment: Mapping[str, str], keys: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start one. Its parent is the calling thread, whose end is the child's end."""
    command = [sys.executable, "-m", "deploy.ray_child"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {SUPERVISOR_PID: str(os.getpid())})
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps({"arguments": arguments, "environment": environment, "keys": keys or {}}).encode())
    return process


def main() -> int:
    # An end while nothing else has a handler yet is in order, too: the keys are removed.
    signal.signal(signal.SIGTERM, _end)
    end_with_parent(signal.SIGTERM)
    if orphaned():
        return 1
    given = json.load(sys.stdin)
    # Our own children have us for a supervisor.
    del os.environ[SUPERVISOR_PID]
    os.environ.update(given["environment"])
    # The actor that starts it needs nothing of the command line.
    from deploy.cli import main as run

    if not given["keys"]:
        return run(given["arguments"])
    with _key_folder(given["keys"]) as folder:
        return run([*given["arguments"], "--curve-keys", folder])


def sweep(parent: Path) -> None:
    """Remove the keys that killed processes of this user have left: a lock shows that the owner lives."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < _SECONDS_TO_LOCK:
                continue
            with _locked(path):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _key_folder(keys: Mapping[str, str]) -> Iterator[str]:
    """Write keys into a folder that is removed at the end, or by the next process here if this one is killed."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, _locked(Path(folder)):
        for name, text in keys.items():
            file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as opened:
                opened.write(text)
        yield folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; the lock ends with the process. BlockingIOError where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
