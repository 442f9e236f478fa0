"""The keeper's own process, on a machine with or without a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from model_worker.keeper.protocol import Answer, Open, conversation
from shared.endpoints import RunDirectory
from shared.liveness import SUPERVISOR_PID
from shared.settings import Settings

PATIENCE = 60.0


def asked(path: Path, process: subprocess.Popen[bytes]) -> tuple[Answer, int | None]:
    """The first answer of a keeper, once it is there."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with conversation(path) as line:
                return line.ask(Open("one"))
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_it_needs_no_torch_and_says_what_this_machine_cannot_do() -> None:
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        place = RunDirectory(Path(folder))
        place.settings_file.write_text(Settings().to_json())
        command = [sys.executable, "-m", "model_worker.keeper", "--run-dir", folder, "--index", "3", "--device"]
        environment = os.environ | {SUPERVISOR_PID: str(os.getpid())}
        with subprocess.Popen([*command, "cuda:0"], env=environment) as process:
            try:
                answer, descriptor = asked(place.keeper_socket(3), process)
                assert descriptor is None
                if answer.able:
                    assert answer.reason == "none are kept yet"
                else:
                    assert answer.reason.startswith(("CUDA's driver shares no memory here", "cu", "the GPU or"))
                assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
                process.terminate()
                assert process.wait(PATIENCE) == -signal.SIGTERM
            finally:
                process.kill()
