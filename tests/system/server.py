"""A real `tokenyard serve`: its processes, its port, its end."""

from __future__ import annotations

import json
import re
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from tests.program import Running

START_SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server(Running):
    """`with Server(model, ["--flag", ...], log) as server`: ready inside, gone afterwards.

    No model: the embedded one.
    """

    model: Path | None
    flags: list[str]
    log: Path
    port: int = field(default_factory=free_port)
    key: str = ""
    """Sent with every request, when there is one."""
    tls: ssl.SSLContext | None = None
    python: str = sys.executable
    """The interpreter that has tokenyard."""

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        model = [] if self.model is None else [str(self.model)]
        command = [self.python, "-m", "deploy.cli", "serve", *model, "--port", str(self.port), *self.flags]
        self.begin(command, self.log, START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def is_ready(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/ready", timeout=5, context=self.tls):
            return True

    def processes(self) -> list[int]:
        """Their pids, once each worker has begun what it begins when nobody waits."""
        self.wait_for(
            "the start of mask processes",
            20,
            lambda: self.count("model_worker.grammar.mask_process") >= self.count("model_worker"),
        )
        return sorted(child.pid for child in self.children())

    def count(self, module: str) -> int:
        return sum(f"-m {module} " in _command_line(child) for child in self.children())

    def child(self, module: str, nth: int = 0) -> psutil.Process:
        """The nth child whose command line names the module."""
        found = [c for c in self.children() if f"-m {module} " in _command_line(c)]
        return sorted(found, key=lambda c: c.pid)[nth]

    def post(self, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60, context=self.tls) as response:
            return json.load(response)

    def metrics(self, name: str) -> dict[str, float]:
        """Samples of one metric by their labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=90, context=self.tls) as response:
            text = response.read().decode()
        pattern = re.compile(rf"^{name}(\{{.*\}})? (\S+)$", re.MULTILINE)
        return {labels or "": float(value) for labels, value in pattern.findall(text)}

    def wait_for(self, what: str, seconds: float, condition: Any) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s:\n{self.log.read_text()}"
            time.sleep(0.05)


def _command_line(process: psutil.Process) -> str:
    """Nothing for a process that has just ended: killing is what some tests do."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
