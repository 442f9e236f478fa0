"""A real Prometheus scrapes a server, and answers what the Grafana dashboard asks."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.components import asking
from tests.components.program import Program, find, needs
from tests.deploy.test_grafana import BOARD, expressions
from tests.system.server import Server, free_port

pytestmark = needs("prometheus", "promtool")

RATE_INTERVAL = "1m"
"""Longer than these tests take until they ask."""
COLON = "metric names should not contain ':'"
"""What promtool says of the names that dashboards for vLLM and SGLang ask for: aliases, on purpose."""


@pytest.fixture(scope="module")
def scraped(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that has seen counters move."""
    directory, port = tmp_path_factory.mktemp("prometheus"), free_port()
    job = {"job_name": "tokenyard", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}
    settings = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [job]}
    (directory / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    places = [f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}"]
    with Program(["prometheus", *places, f"--web.listen-address=127.0.0.1:{port}"], port, directory) as running:
        url = f"http://127.0.0.1:{running.port}"
        deadline = time.monotonic() + 90
        while httpx.get(f"{url}/-/ready").status_code == 503:  # it reads its storage, and may have to wait for the disk
            assert time.monotonic() < deadline, running.output.read_text()
            time.sleep(0.1)
        while not (
            samples(url, "count_over_time(up[1m]) >= 8")
            and samples(url, "rate(tokenyard_generation_tokens_total[1m]) > 0")
        ):
            assert time.monotonic() < deadline, running.output.read_text()
            be_busy(server)
        yield url


def be_busy(server: Server) -> None:
    """One answer of each sort: a prompt that is known, a stream, a chat, and one that is refused."""
    with httpx.Client(base_url=server.url, timeout=asking.SECONDS) as client:
        client.post("/v1/completions", json=asking.completion(4))
        client.post("/v1/completions", json=asking.completion(16, stream=True))
        client.post("/v1/chat/completions", json=asking.long_chat())
        client.post("/v1/completions", json={"prompt": 3.5})
    time.sleep(0.3)


def samples(url: str, expression: str) -> list[dict[str, Any]]:
    answer = httpx.get(url + "/api/v1/query", params={"query": expression})
    assert answer.status_code == 200, (expression, answer.text)
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def test_promtool_accepts_the_metrics(scraped: str, server: Server) -> None:
    text = httpx.get(server.url + "/metrics").content
    checked = subprocess.run([find("promtool") or "", "check", "metrics"], input=text, capture_output=True, timeout=90)
    said = (checked.stdout + checked.stderr).decode().splitlines()
    assert [line for line in said if COLON not in line] == []
    assert checked.returncode in (0, 3), "3 stands for the names with colons, 1 for a text that is no metrics"


def test_no_scrape_failed(scraped: str) -> None:
    """A page that cannot be read fails at every scrape; a busy machine may miss the second that one has."""
    deadline = time.monotonic() + 60
    while not samples(scraped, "min_over_time(up[5s]) == 1"):
        assert time.monotonic() < deadline, samples(scraped, "up[1m]")
        time.sleep(0.5)


def test_what_was_counted_is_what_was_asked(scraped: str, server: Server) -> None:
    """The server's own page and Prometheus agree, one scrape later."""
    [(labels, value)] = [
        (labels, value)
        for labels, value in server.metrics("tokenyard_requests_total").items()
        if "/v1/chat/completions" in labels and "invalid" not in labels
    ][:1]
    deadline = time.monotonic() + 60
    while [float(sample["value"][1]) for sample in samples(scraped, f"tokenyard_requests_total{labels}")] != [value]:
        assert time.monotonic() < deadline, (labels, value)
        time.sleep(0.3)


def test_every_query_of_the_dashboard_is_valid_and_has_data(scraped: str) -> None:
    board = json.loads(BOARD.read_text())
    for expression in expressions(board):
        filled = expression.replace("$__rate_interval", RATE_INTERVAL).replace("$instance", ".*")
        assert "$" not in filled
        assert samples(scraped, filled), f"no data for {filled}"


def test_the_dashboards_choice_of_servers_has_this_one(scraped: str, server: Server) -> None:
    answer = httpx.get(scraped + "/api/v1/label/instance/values", params={"match[]": "tokenyard_scheduler_ready"})
    assert answer.json()["data"] == [f"127.0.0.1:{server.port}"]
