"""A worker whose two ranks are on two hosts: whichever of them dies, and when the link is cut, no byte is lost."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from shared.curve import make_peer_keys, make_server_keys
from tests.chaos.streams import Heard, Request, completion_facts
from tests.chaos.waves import compare, run
from tests.program import STOP_SECONDS
from tests.system.bad_network import BadNetwork, NoNetwork
from tests.system.server import Server, free_port

STREAMS = 8
FLAGS = ["--dtype", "float32", "--kv-memory", "16MB"]
# Seconds in which a rank is missed, its group starts anew, and its requests are taken up.
START_SECONDS = 90.0


class Hosts:
    """A server without a device, and its worker: rank 0 on its host, and rank 1 on the other one."""

    def __init__(self, network: BadNetwork, server: Server, nodes: list[subprocess.Popen[bytes]]) -> None:
        self.network = network
        self.server = server
        self.nodes = nodes

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank that serves: the youngest, since a fork server may have been its parent."""
        children = psutil.Process(self.nodes[number].pid).children(recursive=True)
        ranks = [child for child in children if f"--rank {number} " in " ".join(child.cmdline()) + " "]
        return max(ranks, key=lambda child: child.create_time())

    def starts(self, number: int) -> int:
        """How often a rank has begun to serve."""
        return len(re.findall(rf"model_worker:remote\.{number} .*ready", self.log(number)))

    def log(self, number: int) -> str:
        return self.server.log.with_name(f"node{number}.log").read_text()


def requests() -> list[Request]:
    body = {"stream": True, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    return [
        Request("/v1/completions", {**body, "prompt": f"{number} is a number"}, completion_facts)
        for number in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def hosts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        try:
            network = stack.enter_context(BadNetwork())
        except NoNetwork as problem:
            pytest.skip(str(problem))
        keys = folder / "keys"
        make_server_keys(keys)
        carried = make_peer_keys(keys, "group")
        endpoint = f"tcp://{network.here}:{free_port()}"
        nodes = [
            stack.enter_context(node(number, network, endpoint, model, carried, folder, f"{network.here}:{rendezvous}"))
            for rendezvous in [free_port()]
            for number in range(2)
        ]
        flags = [*FLAGS, "--devices", "none", "--worker-endpoint", endpoint, "--curve-keys", str(keys)]
        yield Hosts(network, stack.enter_context(Server(model, flags, folder / "log")), nodes)


def node(
    number: int, network: BadNetwork, endpoint: str, model: Path, keys: Path, folder: Path, rendezvous: str
) -> Node:
    inside = network.inside if number else []
    command = [*inside, sys.executable, "-m", "deploy.cli", "worker", endpoint, str(model), "--devices", "cpu"]
    group = ["--nodes", "2", "--node", str(number), "--rendezvous", rendezvous, "--curve-keys", str(keys)]
    return Node([*command, *group, *FLAGS], folder / f"node{number}.log")


class Node:
    """A `tokenyard worker` in this context."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self._log = log

    def __enter__(self) -> subprocess.Popen[bytes]:
        with self._log.open("w") as file:
            self._process = subprocess.Popen(self._command, stdout=file, stderr=file)
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(STOP_SECONDS)


@pytest.fixture(scope="module")
def expected(server: Server) -> list[Heard]:
    """What one rank says: a server of the same model whose worker is one process."""
    return run(server, requests())


def check(hosts: Hosts, expected: list[Heard], disturb: Callable[[Server], None] = lambda _: None) -> None:
    heard = run(hosts.server, requests(), disturb, after=0.5)
    outcome = compare(requests(), expected, heard)
    logs = "\n".join([hosts.server.log.read_text(), hosts.log(0), hosts.log(1)])
    assert outcome.clean, f"{outcome}\n{logs}"


def test_tokens_are_those_of_one_rank(hosts: Hosts, expected: list[Heard]) -> None:
    check(hosts, expected)
    assert all('device="cpu+cpu"' in labels for labels in hosts.server.metrics("tokenyard_kv_blocks"))


@pytest.mark.parametrize("number", [0, 1])
def test_no_byte_is_lost_with_a_rank(number: int, hosts: Hosts, expected: list[Heard]) -> None:
    before = [hosts.starts(rank) for rank in range(2)]
    victim = hosts.rank(number)
    check(hosts, expected, lambda _: victim.send_signal(signal.SIGKILL))
    hosts.server.wait_for(
        "both ranks start anew", START_SECONDS, lambda: all(hosts.starts(rank) > before[rank] for rank in range(2))
    )
    other = hosts.log(1 - number)
    assert re.search(rf"rank {number} \(pid {victim.pid} on .*\) is not heard", other), other


def test_no_byte_is_lost_when_the_link_is_cut(hosts: Hosts, expected: list[Heard]) -> None:
    ranks = [hosts.rank(number) for number in range(2)]

    def cut(_: Server) -> None:
        hosts.network.cut()
        try:
            psutil.wait_procs(ranks, START_SECONDS)
        finally:
            hosts.network.heal()

    check(hosts, expected, cut)
    assert not any(rank.is_running() for rank in ranks)
