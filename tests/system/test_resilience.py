"""What clients see when things end early: clients themselves, workers, the scheduler, the whole server."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.system.server import Server, free_port

LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
FLAGS = ["--dtype", "float32", "--kv-memory", "64MB"]


def open_stream(server: Server, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def last_frame(response: http.client.HTTPResponse, on_frame: Callable[[int], None] = lambda _: None) -> Any:
    """Reads an SSE stream to its end; the last JSON frame."""
    frame, count = None, 0
    for line in response:
        if line.startswith(b"data: {"):
            frame = json.loads(line[6:])
            count += 1
            on_frame(count)
    return frame


def used_blocks(server: Server) -> float:
    return sum(value for labels, value in server.metrics("tokenyard_kv_blocks").items() if 'state="used"' in labels)


def running(server: Server) -> float:
    return sum(server.metrics("tokenyard_requests_running").values())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(server: Server, stream: bool) -> None:
    body = {"text": "Hello", "sampling_params": LONG | {"max_new_tokens": 2000}, "stream": stream}
    prompts, cancelled = server.totals("tokenyard_prompt_tokens_total", "tokenyard_scheduler_cancelled_total")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    server.wait_for("its prompt is submitted", 60, lambda: server.total("tokenyard_prompt_tokens_total") > prompts)
    if connection.sock is not None:
        connection.sock.shutdown(2)
    connection.close()
    # All of one status: an older one knows nothing of this request.
    names = ("tokenyard_requests_running", 'tokenyard_kv_blocks{state="used"}')

    def is_gone() -> bool:
        now, *held = server.totals("tokenyard_scheduler_cancelled_total", *names)
        return now > cancelled and held == [0, 0]

    server.wait_for("the request is cancelled and holds nothing", 60, is_gone)


def test_the_api_process_is_light(server: Server) -> None:
    api = server.child("api_server")
    assert api.memory_info().rss < 300e6
    assert not any("libtorch" in mapping.path for mapping in api.memory_maps())


def test_a_model_that_cannot_work_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    command = [sys.executable, "-m", "deploy.cli", "serve", str(tmp_path), "--port", str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode != 0
    assert "mamba" in (ended.stdout + ended.stderr).lower()
