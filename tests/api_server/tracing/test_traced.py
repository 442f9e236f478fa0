"""Requests to a real server, and the spans that arrive at a collector."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from api_server.answers.one_shot import OneShot
from api_server.text.tokenizer import Tokenizer
from api_server.trace_context import TraceContext
from api_server.tracing.exporter import ASKED_AT_ONCE, Exporter
from api_server.tracing.library_log import LibraryLog
from api_server.tracing.start import measured
from interfaces import Decision, ErrorCode, RequestError, Stage
from interfaces.messages import Submit
from shared.endpoints import RunDirectory
from shared.otel_settings import OtelMetricsSettings, OtelSettings
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, serving
from tests.api_server.scheduler_double import SchedulerDouble
from tests.api_server.tracing.test_spans import answer, record_of
from tests.otlp_collector import Collector, Span, collecting

HTTP = httpx.Client(timeout=90)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SECRET = "my-own-secret-prompt"
# vLLM's names, which dashboards ask for.
VLLM = {
    "gen_ai.request.id",
    "gen_ai.request.n",
    "gen_ai.usage.prompt_tokens",
    "gen_ai.usage.completion_tokens",
    "gen_ai.latency.time_in_queue",
    "gen_ai.latency.time_to_first_token",
    "gen_ai.latency.e2e",
    "gen_ai.latency.time_in_model_prefill",
    "gen_ai.latency.time_in_model_decode",
    "gen_ai.latency.time_in_model_inference",
}

Start = Callable[[OtelSettings], AbstractContextManager[LiveServer]]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    # A loaded machine takes longer than a process that ends would wait.
    monkeypatch.setattr("api_server.tracing.exporter.SECONDS_TO_END", 60.0)
    with collecting() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=mine")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        yield found


@pytest.fixture
def start(
    double: SchedulerDouble, run_directory: RunDirectory, tokenizer: Tokenizer, model_directory: Path
) -> Callable[[OtelSettings], Any]:
    settings = Settings(model=str(model_directory))
    return lambda otel: serving(double, run_directory, tokenizer, settings, otel)


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8, **more}


def root(collector: Collector, name: str) -> Span:
    (span,) = collector.wait_for(name)
    return span


def test_a_request_in_the_trace_of_its_caller(start: Start, collector: Collector) -> None:
    with start(OtelSettings(delay=0.01)) as live:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1", "x-request-id": "mine"}
        answer_of = live.double.answer

        def decided(submit: Submit) -> list[int]:
            for stage, worker in ((Stage.QUEUED, -1), (Stage.PLACED, 2), (Stage.FIRST_TOKEN, -1), (Stage.ENDED, -1)):
                live.double.request_log.record("mine", "why", stage, 5, worker, submit.scheduling.span_id)
            return answer_of(submit)

        live.double.answer = decided
        body = chat(temperature=0.5, seed=(1 << 64) - 1, stop=["never"])
        answer = HTTP.post(live.url + "/v1/chat/completions", json=body, headers=headers)
        span = root(collector, f"chat {live.state.model_name}")
    assert (span.trace_id, span.parent, span.kind, span.trace_state) == (TRACE, PARENT, 2, "a=1")
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{span.span_id}-01"
    usage = answer.json()["usage"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": live.state.model_name,
        "gen_ai.response.model": live.state.model_name,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.seed": str((1 << 64) - 1),
        "gen_ai.request.stop_sequences": ["never"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.request.id": "mine",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "tokenyard.outcome": "ok",
    }
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert (span.resource["service.name"], span.resource["deployment.environment"]) == ("tokenyard", "test")
    assert collector.headers["x-tenant"] == "mine"
    prepare, request = collector.children(span)
    assert (prepare.name, request.name) == ("prepare", "llm_request")
    assert span.start == prepare.start <= prepare.end <= request.start < request.end <= span.end
    assert request.attributes.keys() >= VLLM
    assert [(one.name, one.attributes.get("tokenyard.worker")) for one in collector.children(request)] == [
        *(("queue", None), ("prefill", 2), ("decode", 2))
    ]
    assert SECRET not in repr(collector.spans)


def test_streams_choices_and_requests_that_are_refused(start: Start, collector: Collector) -> None:
    with start(OtelSettings(delay=0.01)) as live:
        HTTP.post(live.url + "/v1/completions", json={"prompt": "x", "n": 3, "stream": True}).read()
        answered = root(collector, f"text_completion {live.state.model_name}")
        assert len(collector.wait_for("llm_request", 3)) == 3
        assert answered.parent == ""
        assert answered.attributes["gen_ai.request.choice.count"] == 3
        refused = HTTP.post(live.url + "/v1/completions", json={"prompt": "x", "max_tokens": -1})
        span = root(collector, "text_completion")
        assert refused.headers["traceresponse"].split("-")[1:3] == [span.trace_id, span.span_id]
        assert span.attributes["error.type"] == "invalid"
        assert span.status == (2, "invalid: max_new_tokens")
        # What computes nothing has no span.
        seen = len(collector.spans)
        HTTP.get(live.url + "/v1/models")
        HTTP.post(live.url + "/tokenize", json={"prompt": "x"})
    assert len(collector.spans) == seen


def test_what_its_caller_does_not_sample_is_not_recorded(start: Start, collector: Collector) -> None:
    with start(OtelSettings(delay=0.01)) as live:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        answer = HTTP.post(live.url + "/v1/chat/completions", json=chat(), headers=headers)
        assert answer.headers["traceresponse"].startswith(f"00-{TRACE}-")
        assert answer.headers["traceresponse"].endswith("-00")
    assert collector.exports == 0


def test_the_sampler_is_the_operators(start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with start(OtelSettings(delay=0.01)) as live:
        HTTP.post(live.url + "/v1/chat/completions", json=chat())
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        HTTP.post(live.url + "/v1/chat/completions", json=chat(), headers=headers)
    assert {span.trace_id for span in collector.spans} == {TRACE}


async def test_the_queue_is_bounded_and_its_end_sends_what_waits(collector: Collector) -> None:
    counts = Counter[str]()

    async def recall(request_ids: Sequence[str]) -> list[Decision]:
        return []

    def count(outcome: str, number: int) -> None:
        counts[outcome] += number

    exporter = Exporter(OtelSettings(most_waiting=3, delay=3600), recall, count)
    for _ in range(5):
        exporter.add(record_of(answer(2, 8)))
    assert counts == {"dropped": 2}
    await exporter.close()
    assert counts == {"dropped": 2, "sent": 3}
    assert len(collector.wait_for("llm_request", 3)) == 3


async def test_the_scheduler_is_asked_about_few_requests_at_once(collector: Collector) -> None:
    asked: list[int] = []

    async def recall(request_ids: Sequence[str]) -> list[Decision]:
        asked.append(len(request_ids))
        return [Decision(number, 7, 2.0, Stage.QUEUED, -1, own, own) for number, own in enumerate(request_ids)]

    exporter = Exporter(OtelSettings(delay=3600), recall, lambda outcome, number: None)
    ids = {f"{number:016x}" for number in range(1, 2 * ASKED_AT_ONCE + 2)}
    for own in ids:
        exporter.add(record_of(answer(2, 8))._replace(request_id=own, span=TraceContext(TRACE, own, 1)))
    await exporter.close()
    assert asked == [ASKED_AT_ONCE, ASKED_AT_ONCE, 1]
    queues = {span.parent: span for span in collector.wait_for("queue", len(ids))}
    requests = {span.span_id: span for span in collector.wait_for("llm_request", len(ids))}
    assert len(queues) == len(requests) == len(ids)
    for above, queue in queues.items():
        assert queue.events == [{"tokenyard.decision": requests[above].parent}]


async def test_a_collector_that_does_not_answer_holds_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api_server.tracing.exporter.SECONDS_TO_END", 0.1)
    counts = Counter[str]()

    async def recall(request_ids: Sequence[str]) -> list[Decision]:
        return []

    def count(outcome: str, number: int) -> None:
        counts[outcome] += number

    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        exporter = Exporter(OtelSettings(delay=0.01), recall, count)
        exporter.add(record_of(answer(2, 8)))
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        with connection:
            await exporter.close()
            assert counts == {"dropped": 1}
            assert [thread for thread in threading.enumerate() if thread not in before and not thread.daemon] == []


def test_what_the_collector_refuses_is_counted(start: Start, collector: Collector) -> None:
    with start(OtelSettings(delay=0.01)) as live:
        collector.status = 400
        for _ in range(3):
            HTTP.post(live.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1})
        live.double.wait(lambda: counted(live) == {"sent": 0, "dropped": 3})
        collector.status = 200
        HTTP.post(live.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1})
        live.double.wait(lambda: counted(live) == {"sent": 1, "dropped": 3})


class Lines(logging.Handler):
    """What comes to the root logger, as in a server. pytest's own handler is also at loggers that pass nothing on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    handler = Lines()
    logging.getLogger().addHandler(handler)
    yield handler.found
    logging.getLogger().removeHandler(handler)


async def test_one_line_says_why_spans_are_dropped(collector: Collector, lines: list[logging.LogRecord]) -> None:
    async def recall(request_ids: Sequence[str]) -> list[Decision]:
        return []

    collector.status = 401
    exporter = Exporter(OtelSettings(delay=3600), recall, lambda outcome, number: None)
    exporter.add(record_of(answer(2, 8)))
    await exporter.close()
    (line,) = [one for one in lines if one.name.startswith(("tokenyard", "opentelemetry"))]
    assert (line.name, line.levelno) == ("tokenyard", logging.WARNING)
    assert line.getMessage().startswith("spans of 1 requests are dropped so far: the collector did not take them: ")
    assert "401" in line.getMessage()


def test_a_reason_is_the_first_line_of_the_library_without_a_password(lines: list[logging.LogRecord]) -> None:
    library = LibraryLog()
    try:
        about = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        about.warning("Transient error of %s", "http://me:secret@collector:4318/v1/traces")
        about.error("Failed")
        assert library.take() == "Transient error of http://collector:4318/v1/traces"
        assert library.take() == ""
    finally:
        library.close()
    assert [line for line in lines if line.name == about.name] == []


def test_the_end_of_a_process_sends_what_waits(start: Start, collector: Collector) -> None:
    with start(OtelSettings(delay=3600)) as live:
        HTTP.post(live.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert collector.exports == 0
    assert len(collector.wait_for("llm_request")) == 1


def counted(live: LiveServer) -> dict[str, float]:
    text = HTTP.get(live.url + "/metrics").text
    name = "tokenyard_traced_requests_total"
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return {
        outcome: sum(float(line.split()[-1]) for line in lines if outcome in line) for outcome in ("sent", "dropped")
    }


def test_metrics_are_sent_when_a_process_ends(start: Start, collector: Collector) -> None:
    metrics = measured(OtelMetricsSettings(interval=3600.0, latest_names=True))
    assert metrics is not None
    with start(OtelSettings()) as live:
        live.state.observers.append(metrics)
        HTTP.post(live.url + "/v1/chat/completions", json=chat()).raise_for_status()
        HTTP.post(live.url + "/v1/completions", json={"prompt": "x", "n": 2, "max_tokens": 4}).raise_for_status()
        HTTP.post(live.url + "/v1/completions", json={"prompt": "x", "max_tokens": -1})
    asyncio.run(metrics.close())
    assert set(collector.histograms) == {
        f"gen_ai.server.{name}" for name in ("request.duration", "time_to_first_token", "time_per_output_token")
    }
    model = live.state.model_name
    for points in collector.histograms.values():
        by_operation = {about["gen_ai.operation.name"]: (count, total, about) for count, total, about in points}
        assert {name: count for name, (count, *_) in by_operation.items()} == {"chat": 1, "text_completion": 2}
        assert all(total >= 0 for _, total, _ in by_operation.values())
        assert all(about["gen_ai.request.model"] == model for *_, about in by_operation.values())
        assert all(about["gen_ai.provider.name"] == "tokenyard" for *_, about in by_operation.values())
        assert SECRET not in repr(points)


def test_what_fails_after_its_start_has_a_duration_with_its_error(start: Start, collector: Collector) -> None:
    metrics = measured(OtelMetricsSettings(interval=3600.0))
    assert metrics is not None
    with start(OtelSettings()) as live:
        live.state.observers.append(metrics)
        live.double.refuse = RequestError(ErrorCode.FAILED, "the model is broken")
        answer = HTTP.post(live.url + "/v1/chat/completions", json=chat())
        assert answer.status_code == 500
    asyncio.run(metrics.close())
    assert set(collector.histograms) == {"gen_ai.server.request.duration"}
    ((count, total, about),) = collector.histograms["gen_ai.server.request.duration"]
    assert (count, about["error.type"], about["gen_ai.system"]) == (1, "generation_failed", "tokenyard")
    assert total > 0


async def test_what_a_collector_does_not_take_of_metrics_is_one_line(
    collector: Collector, lines: list[logging.LogRecord]
) -> None:
    collector.status = 401
    metrics = measured(OtelMetricsSettings(interval=0.01))
    assert metrics is not None
    metrics.texts_abandoned(OneShot("/v1/embeddings", 0.0, 1, 1, "", "model"))
    await asyncio.to_thread(collector.wait, lambda: collector.exports >= 3)
    await metrics.close()
    (line,) = [one for one in lines if one.name.startswith(("tokenyard", "opentelemetry"))]
    assert (line.name, line.levelno) == ("tokenyard", logging.WARNING)
    assert line.getMessage().startswith("metrics were not sent: ")
    assert "401" in line.getMessage()


def test_lines_about_metrics_are_no_reason_of_spans() -> None:
    library = LibraryLog()
    try:
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.metric_exporter").error("Failed")
        assert library.take() == ""
    finally:
        library.close()


def test_without_a_word_in_the_environment_no_metrics_are_sent() -> None:
    assert measured(None) is None
