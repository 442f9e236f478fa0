"""Workers and keepers of weights that are killed: streams go on, and the next worker reads files only where it must.

A CPU's workers stand in for those of a GPU, and memory of the host for the GPU's; all else are the real processes.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from tests.deploy.stage import wait_until_dead
from tests.system.kept_server import KEEPER, WORKER
from tests.system.server import START_SECONDS, Server
from tests.system.test_resilience import last_frame, open_stream

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 11, "max_new_tokens": 300, "ignore_eos": True}
FRAMES_BEFORE = 20
FLAGS = ["--dtype", "float32", "--kv-memory", "16MB"]
KEPT = "of weights are kept for the next worker"
MAPPED = "and no file of them is read"
STARTED = "weight_keeper:0  start python"
READ = "the weights are read from files, since"


class KeptServer(Server):
    def __enter__(self) -> Self:
        command = [self.python, "-m", "tests.system.kept_server", "serve", str(self.model), "--port", str(self.port)]
        self.begin([*command, *self.flags], self.log, START_SECONDS)
        return self

    def said(self, text: str) -> int:
        return self.log.read_text().count(text)

    def wait_until_said(self, text: str, times: int) -> None:
        self.wait_for(f"{text!r} {times} times", 60, lambda: self.said(text) == times)

    def answer(self, killed: psutil.Process | None = None) -> str:
        """The text of a stream, in whose middle a process is killed."""
        body = {"text": "Once upon a time", "sampling_params": SAMPLED, "stream": True}
        connection, response = open_stream(self, body)
        assert response.status == 200, response.read()

        def kill(count: int) -> None:
            if killed is not None and count == FRAMES_BEFORE:
                killed.kill()

        frame: Any = last_frame(response, kill)
        connection.close()
        text: str = frame["text"]
        return text


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "own")


def test_streams_outlive_workers_and_keepers(own: Path, tmp_path: Path) -> None:
    with KeptServer(own, FLAGS, tmp_path / "log") as server:
        server.wait_until_said(KEPT, 1)
        undisturbed = server.answer()
        first = server.child(WORKER)
        assert server.answer(first) == undisturbed
        assert server.said(MAPPED) == 1
        second = server.child(WORKER)
        assert second.pid != first.pid
        maps = Path(f"/proc/{second.pid}/maps").read_text().splitlines()
        assert [line.split()[1] for line in maps if "memfd:tokenyard-piece" in line] == ["r--s"]
        # A keeper that dies takes nothing from the worker; the worker after reads files, and has them kept again.
        keeper = server.child(KEEPER)
        keeper.kill()
        wait_until_dead(keeper.pid)
        server.wait_until_said(STARTED, 2)
        assert server.answer(second) == undisturbed
        server.wait_until_said(f"{READ} none are kept yet", 2)
        server.wait_until_said(KEPT, 2)
        # Files that have changed are other weights.
        weights = own / "model.safetensors"
        os.utime(weights, ns=(0, 0))
        assert server.answer(server.child(WORKER)) == undisturbed
        server.wait_until_said(f"{READ} the weights that were kept are others", 1)
        server.wait_until_said(KEPT, 3)
        assert server.said(MAPPED) == 1
        # Nothing is left of a server whose supervisor is killed.
        pids = [child.pid for child in server.children()]
        assert server.child(KEEPER).pid in pids
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        wait_until_dead(*pids)
