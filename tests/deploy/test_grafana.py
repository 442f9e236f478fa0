"""The Grafana dashboard asks for what /metrics has: names, labels, and the values of labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api_server.conftest import (  # noqa: F401 (fixtures)
    LiveServer,
    double,
    live,
    model_directory,
    run_directory,
    tokenizer,
)

BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "tokenyard.json"


@pytest.fixture
def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BOARD.read_text())
    return found


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def test_every_name_and_label_exists(live: LiveServer, board: dict[str, Any]) -> None:  # noqa: F811
    httpx.post(live.url + "/generate", json={"inputs": "Hello"})
    samples = [
        sample
        for family in text_string_to_metric_families(httpx.get(live.url + "/metrics").text)
        for sample in family.samples
    ]
    labels = {sample.name: set(sample.labels) for sample in samples}
    wanted = expressions(board)
    assert len(wanted) > 40
    scheduler = re.compile(r"tokenyard_scheduler_(preemptions|cancelled|aborted)_total")  # the double has no counters
    for expression in wanted:
        for name, selector in re.findall(r"(tokenyard_\w+)\{([^}]*)\}", expression):
            if scheduler.fullmatch(name):
                continue
            assert name in labels, expression
            matched = {part.partition("=")[0].strip("~") for part in selector.split(",")} - {"instance"}
            assert matched <= labels[name], expression
            for by in re.findall(r"by \(([\w, ]+)\)", expression):
                assert set(by.split(", ")) <= labels[name], expression
    states = {sample.labels["state"] for sample in samples if sample.name == "tokenyard_kv_blocks"}
    assert set(re.findall(r'state="(\w+)"', " ".join(wanted))) <= states


def test_scheduler_counters_exist(board: dict[str, Any]) -> None:
    from scheduler.core import Scheduler
    from scheduler.limits import Limits

    counters = Scheduler(Limits(1, 1, 1, None, 1, True), 1).status().counters
    named = set(re.findall(r"tokenyard_scheduler_(\w+)_total", " ".join(expressions(board))))
    assert named
    assert named <= set(counters)


def test_panels_have_a_place_of_their_own(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables
