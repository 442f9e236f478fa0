"""`tokenyard ray up` on three nodes of this machine: one is lost under streams, and no stream is."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from tests.chaos.streams import Request, completion_facts
from tests.chaos.waves import compare, run
from tests.kills import kill_together
from tests.program import Running
from tests.system.server import START_SECONDS, Server

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed (extra `ray`): pip install 'tokenyard[ray]'"
)

STREAMS = 8
LENGTH = 600
FLAGS = ["--dtype", "float32", "--kv-memory", "16MB"]
# All nodes at the loopback address, no reports to anybody, and no process that is started before it is wanted.
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass
class Nodes(Running):
    """`with Nodes(folder) as nodes`: three of them, of which two have room for workers."""

    folder: Path
    # Ray's own folder, whose path must be short: it has sockets.
    temporary: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="ty-ray-", dir="/tmp"))

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | ENVIRONMENT | {"RAY_TMPDIR": self.temporary}

    @property
    def address(self) -> str:
        return (self.folder / "address").read_text()

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.system.ray_nodes", str(self.folder / "address")]
        try:
            self.begin(command, self.folder / "nodes.log", START_SECONDS, stdin=subprocess.PIPE, env=self.environment)
        except BaseException:
            shutil.rmtree(self.temporary, ignore_errors=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        daemons = self.children()
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                self.end()
            finally:
                # Where the process has ended by an exception they are no longer its children.
                kill_together(daemons)
                shutil.rmtree(self.temporary, ignore_errors=True)

    def is_ready(self) -> bool:
        return (self.folder / "address").exists()

    def lose(self, node: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{node}\n".encode())
        self.process.stdin.flush()


@dataclass
class RayServer(Server):
    """A server that has started its workers on the nodes."""

    nodes: Nodes | None = None

    def __enter__(self) -> Self:
        assert self.nodes is not None
        command = [sys.executable, "-m", "deploy.cli", "ray", "up", str(self.model), "--port", str(self.port)]
        environment = self.nodes.environment | {"RAY_ADDRESS": self.nodes.address}
        self.begin([*command, *self.flags], self.log, START_SECONDS, env=environment)
        return self

    def workers(self) -> int:
        return len({labels for labels in self.metrics("tokenyard_kv_blocks") if 'state="used"' in labels})

    def own_node(self) -> str:
        nodes: list[str] = re.findall(r"the server is on \S+ \(node (\w+)\)", self.log.read_text())
        return nodes[0]

    def places(self) -> list[tuple[str, str]]:
        """The number of each worker that was placed, with the id of its node."""
        return re.findall(r"worker (\d+) is on \S+ \(node (\w+)\)", self.log.read_text())


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[RayServer]:
    with Nodes(tmp_path) as nodes:
        flags = [*FLAGS, "--workers", "2", "--cpus", "1"]
        with RayServer(model, flags, tmp_path / "log", nodes=nodes) as running:
            yield running


def requests() -> list[Request]:
    body = {"stream": True, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 1}
    return [
        Request("/v1/completions", {**body, "prompt": f"{number} is a number", "seed": number}, completion_facts)
        for number in range(STREAMS)
    ]


def test_streams_outlive_a_node(server: RayServer) -> None:
    nodes = server.nodes
    assert nodes is not None
    server.wait_for("both workers join", 120, lambda: server.workers() == 2 and len(server.places()) == 2)
    homes = dict(server.places())
    # The command itself must not be on the node that is lost: it is the server's.
    lost = next(number for number, node in homes.items() if node != server.own_node())
    asked = requests()
    undisturbed = run(server, asked)
    heard = run(server, asked, lambda _: nodes.lose(homes[lost]), after=0.5)
    outcome = compare(asked, undisturbed, heard)
    assert outcome.clean, f"{outcome}\n{server.log.read_text()}"
    server.wait_for("the worker is placed on another node", 90, lambda: len(server.places()) > 2)
    number, node = server.places()[-1]
    assert number == lost
    assert node != homes[lost]
    server.wait_for("the worker joins again", 120, lambda: server.workers() == 2)
    assert compare(asked[:2], undisturbed[:2], run(server, asked[:2])).clean
