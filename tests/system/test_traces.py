"""A real server with traces: spans of the scheduler's own decisions arrive, and lines of the log name their trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from tests.otlp_collector import Collector, collecting
from tests.system.server import Server

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def test_a_request_is_traced_through_the_house(
    model: Path, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    flags = ["--dtype", "float32", "--kv-memory", "2MB", "--log-format", "json", "--access-log"]
    with Server(model, flags, tmp_path / "log") as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        body = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60)
        answer.raise_for_status()
        (request,) = collector.wait_for("llm_request")
        # The scheduler itself refuses what waits too long.
        httpx.post(server.url + "/pause_generation", json={}, timeout=60).raise_for_status()
        late = body | {"queue_timeout": 0.05}
        more = headers | {"x-request-id": "late"}
        failed = httpx.post(server.url + "/v1/completions", json=late, headers=more, timeout=60)
        assert failed.status_code >= 400
        server.wait_for("the line of the scheduler", 30, lambda: lines_about(server.log, "late", "scheduler"))
    stages = collector.children(request)
    assert [stage.name for stage in stages] == ["queue", "prefill", "decode"]
    assert [stage.attributes.get("tokenyard.worker") for stage in stages] == [None, 0, 0]
    assert stages[1].events[0]["tokenyard.decision"].startswith("admitted to worker 0")
    assert stages[2].events[-1]["tokenyard.decision"] == "finished with 5 tokens"
    # The clocks of two processes agree; a tenth of a second is for a machine that is busy elsewhere.
    assert request.start - 1e8 <= stages[0].start <= stages[0].end == stages[1].start <= stages[-1].end
    (access,) = lines_about(server.log, "mine", "api_server:0")
    assert (access["message"], access["trace_id"]) == ("access", TRACE)
    assert access["span_id"] == answer.headers["traceresponse"].split("-")[2]
    (warning,) = lines_about(server.log, "late", "scheduler")
    assert (warning["level"], warning["trace_id"]) == ("warning", TRACE)


def lines_about(log: Path, request_id: str, role: str) -> list[dict[str, Any]]:
    """The JSON lines about a request that a process has written."""
    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"time": ')]
    return [record for record in records if record.get("request_id") == request_id and record["role"] == role]
