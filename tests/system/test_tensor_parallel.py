"""A worker that is a group of ranks: whichever of them dies or hangs, clients get every byte of their answers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import psutil
import pytest

from tests.system.server import Server
from tests.system.test_resilience import last_frame, open_stream

FLAGS = ["--dtype", "float32", "--kv-memory", "16MB", "--max-model-len", "1024", "--tensor-parallel", "2"]
STREAMS = 8
TOKENS = 100


@pytest.fixture(scope="module")
def group(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(model, [*FLAGS, "--stall-timeout", "10"], tmp_path_factory.mktemp("group") / "log") as running:
        yield running


def body(number: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {"text": f"Once upon a time {number}", "sampling_params": sampling, "stream": True}


def why(request: str) -> str:
    command = [sys.executable, "-m", "deploy.cli", "why", request]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def rank_process(server: Server, rank: int) -> psutil.Process:
    """The process of a rank that serves now."""
    [found] = [child for child in server.children() if _rank_of(child) == rank]
    return found


def _rank_of(process: psutil.Process) -> int | None:
    """Nothing for a process that is no rank, such as one that waits to be forked."""
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return None
    if "-m model_worker " not in line:
        return None
    found = re.search(r"--rank (\d+)", line)
    return int(found[1]) if found else 0


def texts(server: Server, disturb: Any = lambda: None) -> list[tuple[str, str]]:
    """The ids and texts of all streams. Once each has begun, `disturb` is called."""
    begun = Barrier(STREAMS + 1)

    def note(count: int) -> None:
        if count == 1:
            begun.wait(60)

    def read(number: int) -> tuple[str, str]:
        connection, response = open_stream(server, body(number))
        assert response.status == 200
        frame = last_frame(response, note)
        connection.close()
        return response.headers["x-request-id"], frame["text"]

    with ThreadPoolExecutor(STREAMS) as threads:
        answers = [threads.submit(read, number) for number in range(STREAMS)]
        begun.wait(60)
        disturb()
        return [answer.result(120) for answer in answers]


@pytest.fixture(scope="module")
def expected(group: Server) -> list[str]:
    return [text for _, text in texts(group)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_byte_is_lost_with_a_rank(rank: int, number: signal.Signals, group: Server, expected: list[str]) -> None:
    said = len(group.log.read_text())
    victim = rank_process(group, rank)
    answers = texts(group, lambda: victim.send_signal(number))
    assert [text for _, text in answers] == expected
    # Had all answers come before the signal, this one notices.
    last = group.post("/generate", {"text": "and", "sampling_params": {"max_new_tokens": 2}})["meta_info"]["id"]
    group.wait_for("the death of the other rank", 20, lambda: not victim.is_running())
    log = group.log.read_text()[said:]
    assert re.search(rf"rank {rank} \(pid {victim.pid}", log) or "model_worker:0 (cpu) died" in log, log
    assert "the rest of its group" in log
    if rank == 1:
        assert any(f"rank 1 (pid {victim.pid}" in why(request) for request in (answers[0][0], last))


def test_it_is_one_worker_whose_weights_stay(group: Server) -> None:
    group.wait_for("a worker", 60, group.is_ready)
    assert all('device="cpu+cpu"' in labels for labels in group.metrics("tokenyard_kv_blocks"))
    with pytest.raises(urllib.error.HTTPError) as refused:
        group.post("/update_weights_from_disk", {"model_path": str(group.model)})
    assert refused.value.code == 400
    assert "a group of ranks (tensor_parallel 2)" in refused.value.read().decode()
