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
        """Their pids, once each worker and each API process of a model that generates has started its helper."""
        helpers = {
            "model_worker": "model_worker.grammar.mask_process",
            "api_server": "api_server.constraints.compile_process",
        }
        self.wait_for(
            "the start of mask processes and compile processes",
            60,
            lambda: all(self.count(helper) >= self.count(module) for module, helper in helpers.items()),
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
        return _samples(self._scraped(), name)

    def totals(self, *names: str) -> list[float]:
        """The sum of each metric over its labels, all of one moment; `NAME{LABEL}` sums the samples with this label.

        Counters of requests are those of now. What begins with tokenyard_scheduler, and gauges, come together in the
        scheduler's status, which is half a second old: a gauge that must be of after an event is asked for together
        with a counter that the event has raised.
        """
        text = self._scraped()
        found = []
        for asked in names:
            name, _, label = asked.partition("{")
            samples = _samples(text, name)
            found.append(sum(value for labels, value in samples.items() if label.removesuffix("}") in labels))
        return found

    def total(self, name: str) -> float:
        [found] = self.totals(name)
        return found

    def _scraped(self) -> str:
        with urllib.request.urlopen(self.url + "/metrics", timeout=90, context=self.tls) as response:
            text: str = response.read().decode()
        return text

    def wait_for(self, what: str, seconds: float, condition: Any) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s:\n{self.log.read_text()}"
            time.sleep(0.05)


def _samples(text: str, name: str) -> dict[str, float]:
    pattern = re.compile(rf"^{name}(\{{.*\}})? (\S+)$", re.MULTILINE)
    return {labels or "": float(value) for labels, value in pattern.findall(text)}


def _command_line(process: psutil.Process) -> str:
    """With a blank behind the last word. Nothing for a process that has just ended: killing is what some tests do."""
    try:
        return " ".join(process.cmdline()).rstrip("] ") + " "
    except psutil.Error:
        return ""
