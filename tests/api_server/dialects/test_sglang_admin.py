"""SGLang's operator routes on the scheduler double: aborts, the cache, pauses, loads, the probe, and who may."""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from api_server.dialects.sglang.loads import Loads, loads_of
from api_server.dialects.sglang.schema import ErrorResponse, GenerateResponse
from api_server.engine import health_probe, questions
from interfaces.messages import Action, Status, WorkerStatus
from interfaces.result.results import ErrorCode, RequestError
from tests.api_server.conftest import LiveServer, encode

HTTP = httpx.Client(timeout=90)


def post(live: LiveServer, path: str, body: Any = None, **more: Any) -> httpx.Response:
    return HTTP.post(live.url + path, json=body, **more)


def endless(live: LiveServer) -> None:
    ids = encode(live.state.tokenizer, "Hello, world!")
    live.double.answer = lambda _: ids
    live.double.step_seconds = 0.005


def in_background(live: LiveServer, body: dict[str, Any]) -> Future[Any]:
    """The answer to /generate of a request that has reached the scheduler."""
    pool = ThreadPoolExecutor(1)
    known = len(live.double.submits)
    future = pool.submit(lambda: httpx.post(live.url + "/generate", json=body, timeout=90).json())
    live.double.wait(lambda: len(live.double.submits) > known)
    pool.shutdown(wait=False)
    return future


def actions(live: LiveServer) -> list[int]:
    return [order.action for order in live.double.orders]


LONG = {"max_new_tokens": 200, "temperature": 0}


def test_an_aborted_request_keeps_what_it_has(live: LiveServer) -> None:
    endless(live)
    rid = secrets.token_hex(4)
    answer = in_background(live, {"text": "Hello", "rid": rid, "sampling_params": LONG})
    other = in_background(live, {"text": "Hello", "rid": "other", "sampling_params": LONG | {"max_new_tokens": 60}})
    live.double.wait(lambda: all(running.done > 3 for running in live.double.running.values()))
    response = post(live, "/abort_request", {"rid": rid})
    assert (response.status_code, response.content) == (200, b"")
    found = answer.result(60)
    GenerateResponse.model_validate(found)
    meta = found["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert found["text"].startswith("Hello")
    assert 3 < meta["completion_tokens"] == len(found["output_ids"]) < 200
    assert other.result(60)["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    metrics = HTTP.get(live.url + "/metrics").text
    assert 'tokenyard_requests_total{outcome="cancelled",route="/generate"} 1.0' in metrics


def test_a_request_aborted_while_it_waits_has_the_documented_form(live: LiveServer) -> None:
    live.double.hold.set()
    answer = in_background(live, {"text": "Hello", "rid": "w", "sampling_params": LONG})
    post(live, "/abort_request", {"rid": "w"})
    found = answer.result(60)
    GenerateResponse.model_validate(found)
    meta = found.pop("meta_info")
    assert found == {"text": "", "output_ids": []}
    assert set(meta) == {"id", "finish_reason", "weight_version", "e2e_latency", "completion_tokens"}
    assert (meta["id"], meta["completion_tokens"]) == ("w", 0)
    assert (meta["finish_reason"]["type"], meta["finish_reason"]["message"]) == ("abort", "Abort in waiting queue")


def test_abort_takes_a_batch_by_the_prefix_and_everything_on_demand(live: LiveServer) -> None:
    endless(live)
    batch = in_background(live, {"text": ["a", "b", "c"], "rid": "batch", "sampling_params": LONG})
    live.double.wait(lambda: len(live.double.running) == 3)
    assert post(live, "/abort_request", {"rid": "unknown"}).status_code == 200
    assert not batch.done()
    post(live, "/abort_request", {"rid": "batch"})
    assert [a["meta_info"]["finish_reason"]["type"] for a in batch.result(60)] == ["abort"] * 3
    streamed: list[dict[str, Any]] = []
    with httpx.stream(
        "POST", live.url + "/generate", json={"text": "a", "stream": True, "sampling_params": LONG}, timeout=90
    ) as response:
        lines = (line for line in response.iter_lines() if line)
        streamed.append(json.loads(next(lines).removeprefix("data: ")))
        post(live, "/abort_request", {"abort_all": True})
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["text"].startswith(streamed[0]["text"])
    live.double.wait(lambda: live.state.engine.running == 0)


@pytest.mark.parametrize("body", [None, {}, {"rid": ""}, {"rid": 3}, {"rid": "a", "abort_all": "yes"}])
def test_an_abort_of_nothing_is_refused(live: LiveServer, body: Any) -> None:
    response = post(live, "/abort_request", body)
    assert response.status_code == 400
    ErrorResponse.model_validate(response.json())
    assert not live.double.orders


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(live: LiveServer, method: str) -> None:
    response = httpx.request(method, live.url + "/flush_cache")
    assert (response.status_code, response.text) == (200, "Cache flushed.\n")
    live.double.refuse_order = "3 requests run"
    response = httpx.request(method, live.url + "/flush_cache")
    assert response.status_code == 400
    assert "3 requests run" in response.json()["error"]["message"]
    assert actions(live) == [Action.FLUSH_CACHE] * 2


def test_flush_cache_waits_as_long_as_it_may(live: LiveServer) -> None:
    live.double.refuse_order = "3 requests run"
    timer = threading.Timer(0.3, lambda: setattr(live.double, "refuse_order", ""))
    started = time.monotonic()
    timer.start()
    assert post(live, "/flush_cache?timeout=60").status_code == 200
    assert time.monotonic() - started >= 0.3
    timer.join()
    for timeout in ("-1", "nan", "x", "1e9"):
        assert "timeout" in post(live, f"/flush_cache?timeout={timeout}").json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (None, [Action.PAUSE, Action.ABORT]),
        ({"mode": "abort"}, [Action.PAUSE, Action.ABORT]),
        ({"mode": "retract"}, [Action.PAUSE, Action.RETRACT]),
        ({"mode": "in_place"}, [Action.PAUSE]),
    ],
)
def test_pause_and_continue(live: LiveServer, body: Any, expected: list[int]) -> None:
    answer = HTTP.post(live.url + "/pause_generation", **({} if body is None else {"json": body})).json()
    assert answer == {"message": "Generation paused successfully.", "status": "ok"}
    assert actions(live) == expected
    answer = HTTP.post(live.url + "/continue_generation").json()
    assert answer == {"message": "Generation continued successfully.", "status": "ok"}
    assert actions(live) == [*expected, Action.CONTINUE]
    assert post(live, "/pause_generation", {"mode": "soon"}).status_code == 400


def test_a_silent_scheduler_is_told(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "SECONDS_TO_ANSWER", 0.2)
    live.double.ignore_orders = True
    response = post(live, "/flush_cache")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    live.double.ignore_orders = False
    assert post(live, "/flush_cache").status_code == 200


def test_health_generate_makes_a_token_unless_tokens_flow(live: LiveServer) -> None:
    assert HTTP.get(live.url + "/health_generate").status_code == 200
    (submit,) = live.double.submits
    assert submit.context.request_id.startswith("HEALTH_CHECK")
    assert submit.text.sampling_params.max_new_tokens == 1
    assert HTTP.get(live.url + "/health_generate").status_code == 200
    assert len(live.double.submits) == 1, "its own token has just proved it"
    assert 'route="/health_generate"' not in HTTP.get(live.url + "/metrics").text


def test_health_generate_sees_that_others_are_served(live: LiveServer) -> None:
    live.double.steps += 1
    live.double.wait(lambda: live.state.engine.moves)
    live.double.hold.set()
    assert HTTP.get(live.url + "/health_generate").status_code == 200
    assert not live.double.submits


def test_health_generate_says_what_is_wrong(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_probe, "PROBE_SECONDS", 0.2)
    live.double.hold.set()
    response = HTTP.get(live.url + "/health_generate")
    assert (response.status_code, response.json()["error_type"]) == (503, "healthcheck")
    assert "no result" in response.json()["reason"]
    live.double.wait(lambda: live.double.cancelled == [live.double.submits[0].handle])
    live.double.refuse = RequestError(ErrorCode.OVERLOADED, "the queue is full")
    assert HTTP.get(live.url + "/health_generate").json()["reason"] == "the queue is full"
    live.double.ready = False
    live.double.wait(lambda: not live.state.engine.health().ready)
    assert "loading" in HTTP.get(live.url + "/health_generate").json()["reason"]


def test_loads(live: LiveServer) -> None:
    found = Loads.model_validate(HTTP.get(live.url + "/v1/loads").json())
    assert found.dp_rank_count == len(found.loads) == 1
    assert found.loads[0].max_total_num_tokens == 1600
    workers = [
        WorkerStatus("cpu", 0, 1, 2, 100, blocks_used=30, blocks_cached=5, steps=40, seconds_since_step=1, max_rows=4),
        WorkerStatus("cpu", 1, 3, 3, 100, blocks_used=20, blocks_cached=0, steps=2, seconds_since_step=2, max_rows=12),
    ]
    loads = loads_of(Status(9, True, "", workers, 7, 5, 4096, 16, 16, 32000, {}))
    assert [load.num_waiting_reqs for load in loads.loads] == [4, 3]
    assert [load.num_used_tokens for load in loads.loads] == [480, 320]
    assert [load.utilization for load in loads.loads] == [2 / 4, 3 / 12]
    assert [load.max_running_requests for load in loads.loads] == [4, 12]
    aggregate = loads.aggregate
    assert (aggregate.total_running_reqs, aggregate.total_waiting_reqs, aggregate.total_reqs) == (5, 7, 12)
    assert aggregate.avg_token_usage == pytest.approx(0.25)


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_detokenize_is_the_way_back(live: LiveServer, path: str) -> None:
    texts = [f"Größe {secrets.token_hex(5)} 日本", "", "a b"]
    ids = post(live, "/v1/tokenize", {"prompt": texts, "add_special_tokens": False}).json()["tokens"]
    assert post(live, path, {"tokens": ids}).json() == {"text": texts}
    assert post(live, path, {"tokens": ids[0]}).json() == {"text": texts[0]}
    end = live.state.tokenizer.eos_token_ids[0]
    assert post(live, path, {"tokens": [*ids[2], end]}).json() == {"text": "a b"}
    shown = post(live, path, {"tokens": [*ids[2], end], "skip_special_tokens": False}).json()["text"]
    assert shown.startswith("a b<|")


@pytest.mark.parametrize("tokens", [None, "a", [-1], [10**7], [[1], [10**7]], [1.5], [1, [2]], [[[1]]], [2**70]])
def test_detokenize_refuses_what_is_no_token(live: LiveServer, tokens: Any) -> None:
    response = post(live, "/detokenize", {"tokens": tokens})
    assert response.status_code == 400
    assert "tokens" in response.json()["error"]["message"]


def test_stream_interval_spaces_the_events(live: LiveServer) -> None:
    endless(live)
    body = {"text": "Hello", "stream": True, "sampling_params": LONG | {"max_new_tokens": 50, "stream_interval": 8}}
    lines = [line for line in post(live, "/generate", body).text.split("\n\n") if line.startswith("data: {")]
    found = [json.loads(line.removeprefix("data: ")) for line in lines]
    counts = [frame["meta_info"]["completion_tokens"] for frame in found]
    gaps = [after - before for before, after in itertools.pairwise(counts)]
    assert counts[-1] == 50
    assert all(gap >= 8 for gap in gaps[:-1])
    assert 2 <= len(counts) <= 8
    whole = post(live, "/generate", body | {"stream": False}).json()
    assert (found[-1]["text"], found[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    refused = post(live, "/generate", {"text": "a", "sampling_params": {"stream_interval": 0}})
    assert "stream_interval must be at least 1" in refused.json()["error"]["message"]


def test_queue_time_is_the_schedulers(live: LiveServer) -> None:
    live.double.queued_us = 250_000
    headers = post(live, "/generate", {"inputs": "Hello"}).headers
    assert headers["x-queue-time"] == "250"
    metrics = HTTP.get(live.url + "/metrics").text
    assert "tokenyard_queue_time_seconds_sum 0.25" in metrics
    assert "tgi_request_queue_duration_count 1.0" in metrics
    assert 'sglang:queue_time_seconds_sum{model_name="tiny-chat"} 0.25' in metrics
