"""A worker on another host, behind a network that is slow, loses packets, and is cut: no stream is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from shared.curve import make_peer_keys, make_server_keys
from tests.attempts import quickest
from tests.chaos.streams import Heard, Request, completion_facts
from tests.chaos.waves import compare, run
from tests.program import STOP_SECONDS
from tests.system.bad_network import BadNetwork, NoNetwork
from tests.system.server import Server, free_port

STREAMS = 8
LENGTH = 600
FLAGS = ["--dtype", "float32", "--kv-memory", "16MB"]
# Seconds of silence that a client may see when a link is cut.
MOST_SILENCE = 8.0


class Bed:
    """A server with a worker of its own, and another worker on the other side of the network."""

    def __init__(self, network: BadNetwork, server: Server, remote: subprocess.Popen[bytes], log: Path) -> None:
        self.network = network
        self.server = server
        self.remote = remote
        self.log = log
        self.asked = requests()
        self.undisturbed = run(server, self.asked)

    def workers(self) -> int:
        return len({labels for labels in self.server.metrics("tokenyard_kv_blocks") if 'state="used"' in labels})

    def wave(self, disturb: Callable[[Server], None]) -> list[Heard]:
        """All streams, with something that happens in their midst. Afterwards the network is whole."""
        self.network.delay = 0.01
        heard = run(self.server, self.asked, disturb, after=1.0)
        self.network.heal()
        self.server.wait_for("the worker comes back", 30, lambda: self.workers() == 2)
        return heard

    def check(self, heard: list[Heard]) -> None:
        outcome = compare(self.asked, self.undisturbed, heard)
        assert outcome.clean, f"{outcome}\n{self.server.log.read_text()}\n{self.log.read_text()}"


def requests() -> list[Request]:
    body = {"stream": True, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 1}
    return [
        Request("/v1/completions", {**body, "prompt": f"{number} is a number", "seed": number}, completion_facts)
        for number in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def bed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("remote")
    try:
        network = BadNetwork().__enter__()
    except NoNetwork as problem:
        pytest.skip(str(problem))
    try:
        yield from _serve(network, model, folder)
    finally:
        network.__exit__()


def _serve(network: BadNetwork, model: Path, folder: Path) -> Iterator[Bed]:
    keys = folder / "keys"
    make_server_keys(keys)
    make_peer_keys(keys, "box")
    endpoint = f"tcp://{network.here}:{free_port()}"
    flags = [*FLAGS, "--devices", "cpu", "--worker-endpoint", endpoint, "--curve-keys", str(keys)]
    with Server(model, flags, folder / "log") as server:
        # A peer that is added while the server runs.
        make_peer_keys(keys, "late")
        command = [*network.inside, sys.executable, "-m", "deploy.cli", "worker", endpoint, str(model)]
        with (folder / "worker.log").open("w") as log:
            options = ["--devices", "cpu", "--curve-keys", str(keys / "late"), *FLAGS]
            remote = subprocess.Popen([*command, *options], stdout=log, stderr=log)
            try:
                server.wait_for("the worker joins", 90, lambda: len(server.metrics("tokenyard_kv_blocks")) == 6)
                yield Bed(network, server, remote, folder / "worker.log")
            finally:
                remote.terminate()
                remote.wait(STOP_SECONDS)


def test_delay_and_loss_change_no_answer(bed: Bed) -> None:
    def worsen(_: Server) -> None:
        bed.network.loss = 0.02

    bed.check(bed.wave(worsen))


@pytest.mark.parametrize("way", ["both", "out", "back"])
def test_streams_move_when_the_link_is_cut_and_the_worker_comes_back_by_itself(bed: Bed, way: str) -> None:
    children = {child.pid for child in psutil.Process(bed.remote.pid).children(recursive=True)}

    def cut(_: Server) -> None:
        bed.network.passes_out = way == "back"
        bed.network.passes_back = way == "out"

    def longest_silence() -> float:
        heard = bed.wave(cut)
        bed.check(heard)
        return max(stream.pause for stream in heard)

    silence = quickest(longest_silence, below=MOST_SILENCE)
    assert 1 < silence < MOST_SILENCE, "some streams were on the worker that was cut off"
    after = {child.pid for child in psutil.Process(bed.remote.pid).children(recursive=True)}
    assert children <= after, "the worker goes on with the weights that it has"


def test_a_worker_that_hears_nothing_says_so_and_serves_again_when_it_is_back(bed: Bed) -> None:
    bed.network.cut()
    time.sleep(0.5)
    bed.server.wait_for("the worker is given up", 30, lambda: bed.workers() == 1)
    bed.server.wait_for("the silence is logged", 30, lambda: "no scheduler" in bed.log.read_text())
    bed.network.heal()
    bed.server.wait_for("the worker comes back", 30, lambda: bed.workers() == 2)
    bed.check(run(bed.server, bed.asked))


def test_a_worker_with_other_settings_is_refused_with_both_values(bed: Bed, model: Path) -> None:
    log = bed.log.with_name("refused.log")
    keys = bed.log.parent / "keys" / "box"
    endpoint = next(flag for flag in bed.server.flags if flag.startswith("tcp://"))
    command = [sys.executable, "-m", "deploy.cli", "worker", endpoint, str(model), "--devices", "cpu"]
    with log.open("w") as file:
        options = ["--curve-keys", str(keys), "--dtype", "bfloat16", "--kv-memory", "16MB"]
        done = subprocess.run([*command, *options], stdout=file, stderr=file, timeout=120, check=False)
    assert done.returncode != 0
    for text in (log.read_text(), bed.server.log.read_text()):
        assert "dtype is 'bfloat16' here and 'float32' in worker 0" in text


def test_streams_of_a_worker_that_is_asked_to_end_go_on_here_with_their_k_and_v(bed: Bed) -> None:
    """The last test: the worker does not come back."""
    # The worker here has computed the same streams in the tests before.
    httpx.post(f"{bed.server.url}/flush_cache", params={"timeout": 20}, timeout=30).raise_for_status()
    names = "tokenyard_scheduler_shipped_tokens_total", "tokenyard_scheduler_recovered_total"
    shipped, recovered = bed.server.totals(*names)
    bed.network.delay = 0.01  # on a fast machine the streams would end before the worker does
    bed.check(run(bed.server, bed.asked, lambda _: bed.remote.terminate(), after=1.0))
    bed.network.heal()
    bed.server.wait_for("the worker is gone", 30, lambda: bed.workers() == 1)
    now, computed_again = bed.server.totals(*names)
    assert now > shipped
    assert computed_again == recovered
    assert bed.remote.wait(STOP_SECONDS) == 0
