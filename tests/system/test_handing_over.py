"""Workers that are asked to end: their streams go on at another one, from the K and V that they have."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.streams import Heard, Request, completion_facts
from tests.chaos.waves import compare, run
from tests.system.server import Server

STREAMS = 8
LENGTH = 600
FLAGS = ["--dtype", "float32", "--kv-memory", "64MB", "--devices", "cpu,cpu", "--api-servers", "2"]


def requests() -> list[Request]:
    body = {"stream": True, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 1}
    texts = [f"{number} is a number, and {'so is the next one, ' * 20}" for number in range(STREAMS)]
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


def both_workers(server: Server) -> bool:
    return sum('state="used"' in labels for labels in server.metrics("tokenyard_kv_blocks")) == 2


def test_streams_of_a_worker_that_is_asked_to_end_go_on_elsewhere(pair: Server, undisturbed: list[Heard]) -> None:
    shipped, handed = pair.totals("tokenyard_scheduler_shipped_tokens_total", "tokenyard_scheduler_handed_over_total")
    recovered = pair.total("tokenyard_scheduler_recovered_total")

    def ask(server: Server) -> None:
        server.child("model_worker").send_signal(signal.SIGTERM)

    outcome = compare(requests(), undisturbed, run(pair, requests(), ask, after=1.0))
    assert outcome.clean, f"{outcome}\n{pair.log.read_text()}"
    pair.wait_for("the count", 60, lambda: pair.total("tokenyard_scheduler_handed_over_total") > handed)
    assert pair.total("tokenyard_scheduler_shipped_tokens_total") - shipped > 100
    assert pair.total("tokenyard_scheduler_recovered_total") == recovered, "nothing was computed again"
    pair.wait_for("the next worker", 60, lambda: both_workers(pair))
    assert "was asked to end" in pair.log.read_text()
