"""A locked server: HTTPS, keys that appear nowhere, and a worker that joins over tcp while strangers do not."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme
import zmq

from interfaces import WorkerHello, encode
from shared.curve import make_peer_keys, make_server_keys
from tests.chaos.waves import run_directory
from tests.system.server import Server, free_port

KEY, ADMIN = secrets.token_urlsafe(), secrets.token_urlsafe()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("locked")


@pytest.fixture(scope="module")
def locked(model: Path, folder: Path) -> Iterator[Server]:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    make_server_keys(folder / "keys")
    make_peer_keys(folder / "keys", "box")
    flags = ["--dtype", "float32", "--kv-memory", "8MB", f"--api-key=other-key,{KEY}", f"--admin-api-key={ADMIN}"]
    flags += ["--ssl-certfile", str(folder / "server.pem")]
    flags += ["--worker-endpoint", f"tcp://127.0.0.1:{free_port()}", "--curve-keys", str(folder / "keys")]
    tls = ssl.create_default_context(cafile=str(folder / "authority.pem"))
    with Server(model, flags, folder / "log", key=KEY, tls=tls) as server:
        yield server


def get(server: Server, path: str, key: str = "") -> bytes:
    request = urllib.request.Request(server.url + path, headers={"x-api-key": key} if key else {})
    with urllib.request.urlopen(request, timeout=90, context=server.tls) as response:
        body: bytes = response.read()
        return body


def test_it_serves_over_tls_to_those_who_have_a_key(locked: Server) -> None:
    assert locked.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3}})["output_ids"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(locked, "/v1/models", "other-key2")
    get(locked, "/v1/models", "other-key")
    with socket.create_connection(("127.0.0.1", locked.port), timeout=5) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not plain.recv(1000).startswith(b"HTTP/1.1 200")


def test_keys_are_nowhere_to_be_seen(locked: Server) -> None:
    processes = [psutil.Process(locked.process.pid), *locked.children()]
    assert len(processes) >= 4
    directory = run_directory(locked)
    shown = [" ".join(process.cmdline()) for process in processes]
    shown += [json.dumps(process.environ()) for process in processes[1:]]
    shown += [file.read_text() for file in directory.iterdir() if file.suffix in (".json", ".log")]
    shown += [locked.log.read_text(), get(locked, "/server_info", KEY).decode()]
    shown += [json.dumps(get(locked, path).decode()) for path in ("/metrics", "/openapi.json", "/health")]
    for text in shown:
        assert KEY not in text
        assert ADMIN not in text
    assert json.loads(get(locked, "/server_info", KEY))["api_key"] == "***"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "settings.json").stat().st_mode & 0o777 == 0o600


def test_a_worker_joins_over_tcp_and_a_stranger_does_not(locked: Server, model: Path, folder: Path) -> None:
    def workers() -> int:
        return len({labels for labels in locked.metrics("tokenyard_kv_blocks") if 'state="used"' in labels})

    assert workers() == 1
    endpoint = locked.flags[locked.flags.index("--worker-endpoint") + 1]
    context: zmq.Context[Any] = zmq.Context()
    stranger: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"remote:7:0:1")
    stranger.connect(endpoint)
    stranger.send(encode(WorkerHello("cpu", 7, 0, 1, 9, 16, 4, 64, 600, "x", "float32", "x")))
    command = [sys.executable, "-m", "deploy.cli", "worker", endpoint, str(model), "--index", "1"]
    flags = ["--devices", "cpu", "--curve-keys", str(folder / "keys" / "box"), "--dtype", "float32"]
    with (folder / "worker.log").open("w") as log:
        remote = subprocess.Popen([*command, *flags, "--kv-memory", "8MB"], stdout=log, stderr=log)
        try:
            locked.wait_for("the worker joins", 120, lambda: workers() == 2)
            assert not stranger.poll(0), "a stranger was answered"
            answer = locked.post("/generate", {"text": ["a", "b", "c"], "sampling_params": {"max_new_tokens": 20}})
            assert len(answer) == 3
        finally:
            remote.send_signal(signal.SIGTERM)
            context.destroy(linger=0)
        assert remote.wait(60) == 0
    locked.wait_for("the worker has left", 60, lambda: workers() == 1)
    locked.wait_for("the goodbye in the log", 60, lambda: "said goodbye" in locked.log.read_text())


def inquire(*arguments: str) -> str:
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)
    return done.stdout + done.stderr


def test_status_and_why_tell_what_happens(locked: Server) -> None:
    headers = {"x-api-key": KEY, "x-request-id": "my-request", "content-type": "application/json"}
    body = json.dumps({"prompt": "x", "max_tokens": 5, "ignore_eos": True}).encode()
    request = urllib.request.Request(locked.url + "/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=90, context=locked.tls):
        pass
    directory = str(run_directory(locked))
    told = inquire("why", "my-request", "--run-dir", directory)
    for event in ("queued with", "admitted to worker 0", "first token", "finished with 5 tokens"):
        assert event in told, told
    assert "no request 'nobody'" in inquire("why", "nobody", "--run-dir", directory)
    locked.child("model_worker").kill()
    locked.wait_for(
        "it is back", 60, lambda: "worker 0: cpu (fused stack), epoch 1" in inquire("status", "--run-dir", directory)
    )
    told = inquire("status", "--run-dir", directory)
    for fact in ("api_server:0", "scheduler", "model_worker:0", "0 run, 0 wait", "SIGKILL", "died"):
        assert fact in told, told
