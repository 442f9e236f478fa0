"""Streams that go on at another worker, from the K and V that they have: theirs is asked to end, or is crowded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scheduler.placement_cost import ROWS_APART
from tests.chaos.streams import Heard, Request, completion_facts
from tests.chaos.waves import compare, run
from tests.system.server import Server

STREAMS = 8
LENGTH = 1200
FLAGS = ["--dtype", "float32", "--kv-memory", "64MB", "--devices", "cpu,cpu", "--api-servers", "2"]
# A prefix that is longer than a step counts more than how many sequences a worker runs.
FLAGS += ["--max-batch-tokens", "128"]
CROWD = ROWS_APART + 4


def requests() -> list[Request]:
    body = {"stream": True, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 1}
    # Half of them have one beginning.
    more = "so is the next one, " * 20
    own = [f"{number} is a number, and {more}" for number in range(0, STREAMS, 2)]
    texts = [*own, *(f"{more}and {number} is a number" for number in range(1, STREAMS, 2))]
    return [
        Request("/v1/completions", {**body, "prompt": text, "seed": number}, completion_facts)
        for number, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(model, FLAGS, tmp_path_factory.mktemp("pair") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(pair: Server) -> list[Heard]:
    return run(pair, requests())


def wait_until_all_run(server: Server) -> None:
    server.wait_for("all run", 60, lambda: server.total("tokenyard_requests_running") == STREAMS)


def both_workers(server: Server) -> bool:
    return sum('state="used"' in labels for labels in server.metrics("tokenyard_kv_blocks")) == 2


def test_streams_of_a_worker_that_is_asked_to_end_go_on_elsewhere(pair: Server, undisturbed: list[Heard]) -> None:
    shipped, handed = pair.totals("tokenyard_scheduler_shipped_tokens_total", "tokenyard_scheduler_handed_over_total")
    recovered = pair.total("tokenyard_scheduler_recovered_total")

    def ask(server: Server) -> None:
        wait_until_all_run(server)
        server.child("model_worker").send_signal(signal.SIGTERM)

    outcome = compare(requests(), undisturbed, run(pair, requests(), ask))
    assert outcome.clean, f"{outcome}\n{pair.log.read_text()}"
    pair.wait_for("the count", 60, lambda: pair.total("tokenyard_scheduler_handed_over_total") > handed)
    assert pair.total("tokenyard_scheduler_shipped_tokens_total") - shipped > 100
    assert pair.total("tokenyard_scheduler_recovered_total") == recovered, "nothing was computed again"
    pair.wait_for("the next worker", 60, lambda: both_workers(pair))
    assert "was asked to end" in pair.log.read_text()


@pytest.mark.parametrize("killed", ["the one that leaves", "the other one"])
def test_a_worker_that_is_killed_meanwhile_loses_nothing(pair: Server, undisturbed: list[Heard], killed: str) -> None:
    recovered = pair.total("tokenyard_scheduler_recovered_total")

    def ask(server: Server) -> None:
        wait_until_all_run(server)
        leaving, other = server.child("model_worker", 0), server.child("model_worker", 1)
        leaving.send_signal(signal.SIGTERM)
        (leaving if killed == "the one that leaves" else other).send_signal(signal.SIGKILL)

    outcome = compare(requests(), undisturbed, run(pair, requests(), ask))
    assert outcome.clean, f"{outcome}\n{pair.log.read_text()}"
    pair.wait_for("the count", 60, lambda: pair.total("tokenyard_scheduler_recovered_total") > recovered)
    pair.wait_for("the next worker", 60, lambda: both_workers(pair))


def test_streams_that_their_prefix_has_crowded_on_one_worker_move_to_the_other(pair: Server) -> None:
    """All are one request, so those that move have the answer of those that stay."""
    names = "tokenyard_scheduler_rebalanced_total", "tokenyard_scheduler_shipped_tokens_total"
    moved, shipped = pair.totals(*names)
    # It costs more than so many sequences where it is cached, even on the idle worker.
    prompt = "All of them begin with these words. " * 60
    pair.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    body = {
        "stream": True,
        "max_tokens": LENGTH,
        "ignore_eos": True,
        "temperature": 1,
        "prompt": prompt,
        "seed": 5,
    }
    heard = run(pair, [Request("/v1/completions", body, completion_facts)] * CROWD)
    assert [one.problem for one in heard] == [""] * CROWD
    assert all(one.facts == heard[0].facts for one in heard)
    pair.wait_for("the count", 60, lambda: pair.total(names[0]) > moved)
    assert pair.total(names[1]) - shipped > 100


def test_the_server_leaves_nothing_behind(pair: Server) -> None:
    """The last test: it ends the server."""
    children = pair.children()
    names = [" ".join(child.cmdline()) for child in children]
    assert [sum(f"-m {m} " in name for name in names) for m in ("api_server", "scheduler", "model_worker")] == [2, 1, 2]
    run_directory = Path(names[0].split("--run-dir ")[1].split()[0].rstrip("]"))
    assert run_directory.is_dir()
    assert run_directory.stat().st_mode & 0o777 == 0o700
    for _ in range(8):
        answer = pair.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3}})
        assert answer["meta_info"]["completion_tokens"] == 3
    pair.process.send_signal(signal.SIGTERM)
    assert pair.process.wait(60) == 0
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert not run_directory.exists()
    # Other servers of this machine have segments, too: a name has the process that made it.
    assert not [name for name in os.listdir("/dev/shm") if any(f"-{child.pid}-" in name for child in children)]
