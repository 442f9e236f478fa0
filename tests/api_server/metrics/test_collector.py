"""The figures of /metrics against what was sent: one server, several replicas, and the names other servers use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api_server.metrics.collector import TOKEN_SECONDS, Metrics
from api_server.metrics.server_facts import ModelState
from interfaces.messages import AdapterState, AdapterStatus, Status, WorkerStatus
from interfaces.result.results import ErrorCode, RequestError
from shared import process_table
from shared.process_table import ProcessState
from tests.api_server.conftest import LiveServer, encode, leave_when

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(live: LiveServer) -> Samples:
    response = httpx.get(live.url + "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parse(response.text)


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


def test_figures_are_what_was_sent(live: LiveServer) -> None:
    prompt = len(encode(live.state.tokenizer, "Hello"))
    answer = len(encode(live.state.tokenizer, "Hello, world!")) + 1
    live.double.cached = 1
    for _ in range(3):
        httpx.post(live.url + "/generate", json={"inputs": "Hello"})
    httpx.post(live.url + "/generate_stream", json={"inputs": "Hello"})
    httpx.post(live.url + "/generate", json={"text": ["Hello", "Hello"]})
    httpx.post(live.url + "/v1/completions", json={"prompt": "Hello", "max_tokens": 50})
    httpx.post(live.url + "/generate", json={"inputs": "Hello", "parameters": {"top_k": 0}})
    httpx.post(live.url + "/generate", content=b"{")
    httpx.post(live.url + "/nowhere", json={})
    live.double.refuse = RequestError(ErrorCode.OVERLOADED, "the queue is full")
    httpx.post(live.url + "/", json={"inputs": "Hello"})
    found = scrape(live)
    requests = "tokenyard_requests_total"
    assert value(found, requests, route="/generate", outcome="ok") == 5
    assert value(found, requests, route="/generate_stream", outcome="ok") == 1
    assert value(found, requests, route="/v1/completions", outcome="ok") == 1
    assert value(found, requests, route="/generate", outcome="invalid") == 2
    assert value(found, requests, route="/", outcome="overloaded") == 1
    assert sum(v for (name, _), v in found.items() if name == requests) == 10
    assert value(found, "tokenyard_prompt_tokens_total") == 8 * prompt
    assert value(found, "tokenyard_generation_tokens_total") == 7 * answer
    assert value(found, "tokenyard_cached_prompt_tokens_total") == 7
    for name in ("time_to_first_token", "e2e_request_latency", "time_per_output_token", "request_wait"):
        assert value(found, f"tokenyard_{name}_seconds_count") == 7, name
    assert value(found, "tokenyard_request_generation_tokens_sum") == 7 * answer
    # Tokens that arrive together with the first one have no gap before them: on a busy machine many do.
    assert 0 < value(found, "tokenyard_inter_token_latency_seconds_count") <= 7 * (answer - 1)


def test_times_are_plausible(live: LiveServer) -> None:
    """The double sends a token every 30 ms at most; a busy machine joins some, and makes others late."""
    live.double.step_seconds = 0.03
    tokens = len(live.double.answer(None))  # type: ignore[arg-type]
    start = time.monotonic()
    httpx.post(live.url + "/generate", json={"inputs": "Hello"})
    took = time.monotonic() - start
    found = scrape(live)
    gaps = value(found, "tokenyard_inter_token_latency_seconds_count")
    assert 0 < gaps < tokens
    assert value(found, "tokenyard_inter_token_latency_seconds_bucket", le="+Inf") == gaps
    total = value(found, "tokenyard_e2e_request_latency_seconds_sum")
    first = value(found, "tokenyard_time_to_first_token_seconds_sum")
    assert 0.025 < first < total < took
    assert total > 0.025 * tokens
    assert total - first == pytest.approx(value(found, "tokenyard_inter_token_latency_seconds_sum"), rel=0.05)


def test_client_that_leaves_is_counted(live: LiveServer) -> None:
    live.double.hold.set()
    leave_when(lambda: live.double.running, live, "/generate", {"text": "Hello"})
    live.double.wait(lambda: live.double.cancelled)
    live.double.hold.clear()
    found = scrape(live)
    assert value(found, "tokenyard_requests_total", route="/generate", outcome="cancelled") == 1
    assert value(found, "tgi_request_failure", err="dropped") == 1
    assert value(found, "sglang:num_aborted_requests_total", model_name="tiny-chat") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "stream": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}),
        ("/generate", {"inputs": "Hello"}),
        ("/generate", {"text": "Hello"}),
        ("/generate_stream", {"inputs": "Hello"}),
    ],
)
def test_a_request_that_an_operator_ends_is_counted_once(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    live.double.hold.set()
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(httpx.post, live.url + path, json=body, timeout=90)
        live.double.wait(lambda: live.double.running)
        assert httpx.post(live.url + "/abort_request", json={"abort_all": True}).status_code == 200
        pending.result(60)
    counted = {labels: v for (name, labels), v in scrape(live).items() if name == "tokenyard_requests_total" and v}
    assert [dict(labels) for labels in counted] == [{"route": path, "outcome": "cancelled"}]
    assert list(counted.values()) == [1]


def test_other_servers_names(live: LiveServer) -> None:
    httpx.post(live.url + "/generate", json={"inputs": "Hello"})
    httpx.post(live.url + "/v1/completions", json={"prompt": "Hello"})
    httpx.post(live.url + "/generate", json={"inputs": ""})
    found = scrape(live)
    assert (value(found, "tgi_request_count"), value(found, "tgi_request_success")) == (3, 2)
    assert value(found, "tgi_request_failure", err="validation") == 1
    assert value(found, "tgi_request_generated_tokens_count") == 2
    for ours, theirs in [
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("time_to_first_token_seconds_sum", "time_to_first_token_seconds_sum"),
        ("e2e_request_latency_seconds_count", "e2e_request_latency_seconds_count"),
    ]:
        mine = value(found, f"tokenyard_{ours}")
        assert mine > 0
        assert value(found, f"sglang:{theirs}", model_name="tiny-chat") == mine


def test_scheduler_facts_come_from_its_last_status() -> None:
    workers = [
        WorkerStatus("cuda:0", 0, 1, 2, 100, blocks_used=30, blocks_cached=5, steps=40, seconds_since_step=1),
        WorkerStatus(
            "cuda:1",
            1,
            3,
            3,
            100,
            blocks_used=20,
            blocks_cached=0,
            steps=2,
            seconds_since_step=2,
            drafted=9,
            accepted=8,
            drafts=4,
            accepted_at=[5, 3],
            encoded=6,
            image_hits=5,
            encode_ms=2500,
            placed_tokens=700,
            saved_tokens=400,
        ),
    ]
    status = Status(9, True, "", workers, 7, 5, 4096, 128, 16, 32000, {"preemptions": 4, "Prefix hits": 2})
    status = replace(status, backlog_seconds=2.5)
    metrics = Metrics("m", ["/generate"])
    found = parse(metrics.exposition(status).decode())
    assert value(found, "tokenyard_requests_running") == value(found, "tgi_batch_current_size") == 5
    assert value(found, "tokenyard_requests_waiting") == value(found, "tgi_queue_size") == 7
    assert value(found, "tokenyard_kv_blocks", device="cuda:0", index="0", state="used") == 30
    assert value(found, "tokenyard_kv_blocks", device="cuda:0", index="0", state="cached") == 5
    assert value(found, "tokenyard_worker_steps_total", device="cuda:1", index="1") == 2
    assert value(found, "tokenyard_worker_starts_total", device="cuda:1", index="1") == 3
    assert value(found, "tokenyard_worker_seconds_since_step", device="cuda:0", index="0") == 1
    assert value(found, "tokenyard_worker_draft_tokens_total", device="cuda:1", index="1") == 9
    assert value(found, "tokenyard_worker_accepted_tokens_total", device="cuda:1", index="1") == 8
    assert value(found, "tokenyard_worker_drafts_total", device="cuda:1", index="1") == 4
    assert value(found, "tokenyard_worker_placed_tokens_total", device="cuda:1", index="1") == 700
    assert value(found, "tokenyard_worker_saved_tokens_total", device="cuda:1", index="1") == 400
    for name, count in (("drafts", 4), ("draft_tokens", 9), ("accepted_tokens", 8)):
        assert value(found, f"vllm:spec_decode_num_{name}_total", model_name="m") == count
    for position, count in (("0", 5), ("1", 3)):
        per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert value(found, per_position, model_name="m", position=position) == count
    assert value(found, "sglang:spec_accept_length", model_name="m") == 3
    assert value(found, "sglang:spec_accept_rate", model_name="m") == pytest.approx(8 / 9)
    assert value(found, "tokenyard_encoded_images_total", device="cuda:1", index="1") == 6
    assert value(found, "tokenyard_encoder_cache_hits_total", device="cuda:1", index="1") == 5
    assert value(found, "tokenyard_image_encode_seconds_total", device="cuda:1", index="1") == 2.5
    assert value(found, "tokenyard_scheduler_preemptions_total") == 4
    assert value(found, "tokenyard_scheduler_prefix_hits_total") == 2
    assert value(found, "tokenyard_scheduler_ready") == 1
    assert value(found, "tokenyard_backlog_seconds") == 2.5
    assert value(found, "sglang:num_used_tokens", model_name="m") == 50 * 16
    assert value(found, "sglang:token_usage", model_name="m") == 0.25
    silent = parse(metrics.exposition(None).decode())
    assert value(silent, "tokenyard_scheduler_ready") == 0
    assert ("tokenyard_requests_running", ()) not in silent


def test_sizes_are_histograms_and_several_models_have_labels() -> None:
    counters = {"texts": 9, "batch_texts<=1": 2, "batch_texts<=4": 1, "batch_texts<=65536": 1, "batch_texts<=": 60_005}
    status = Status(9, True, "", [], 7, 5, 4096, 128, 16, 32000, counters)
    found = parse(Metrics("chat", ["/generate"]).exposition(status).decode())
    for bound, count in (("1.0", 2), ("2.0", 2), ("4.0", 3), ("16384.0", 3), ("+Inf", 4)):
        assert value(found, "tokenyard_scheduler_batch_texts_bucket", le=bound) == count
    assert value(found, "tokenyard_scheduler_batch_texts_count") == 4
    assert value(found, "tokenyard_scheduler_batch_texts_sum") == 60_005
    assert value(found, "tokenyard_scheduler_texts_total") == 9
    others = [ModelState("embed", status, 0.5), ModelState("rerank", None, 0.0)]
    found = parse(Metrics("chat", ["/generate"]).exposition(status, others=others).decode())
    for model, ready in (("chat", 1), ("embed", 1), ("rerank", 0)):
        assert value(found, "tokenyard_scheduler_ready", model=model) == ready
    assert value(found, "tokenyard_scheduler_silent_seconds", model="embed") == 0.5
    assert value(found, "tokenyard_scheduler_batch_texts_bucket", model="embed", le="4.0") == 3
    assert value(found, "tgi_batch_current_size") == 5


def test_other_names_show_the_first_model() -> None:
    workers = [WorkerStatus("cpu", 0, 1, 2, 100, blocks_used=30, blocks_cached=5, steps=40, seconds_since_step=0.5)]
    status = Status(9, True, "", workers, 7, 5, 4096, 128, 16, 32000, {})
    others = [ModelState("embed", status, 0.5)]
    metrics = Metrics("chat", ["/generate"])
    found = parse(metrics.exposition(status, others=others).decode())
    assert value(found, "sglang:num_used_tokens", model_name="chat") == 30 * 16
    assert value(found, "sglang:max_total_num_tokens", model_name="chat") == 100 * 16
    assert value(found, "sglang:num_queue_reqs", model_name="chat") == value(found, "tgi_queue_size") == 7
    silent = metrics.exposition(status, 60.0, others=others).decode()
    assert "sglang:num_queue_reqs" not in silent
    assert "tgi_queue_size" not in silent
    assert "sglang:num_used_tokens" not in silent


def test_what_is_past_is_not_shown_as_present() -> None:
    """While the scheduler is silent an alert must fire: not ready, ages go on, and no gauge says that all is well."""
    workers = [WorkerStatus("cpu", 0, 1, 2, 100, blocks_used=30, blocks_cached=5, steps=40, seconds_since_step=0.5)]
    status = Status(9, True, "", workers, 7, 5, 4096, 128, 16, 32000, {"preemptions": 4})
    metrics = Metrics("m", ["/generate"])
    for name, seconds, draining, ready in (("fresh", 1.0, False, 1), ("draining", 1.0, True, 0)):
        found = parse(metrics.exposition(status, seconds, draining).decode())
        assert value(found, "tokenyard_scheduler_ready") == ready, name
        assert value(found, "tokenyard_requests_running") == 5, name
    old = parse(metrics.exposition(status, 12.0).decode())
    assert value(old, "tokenyard_scheduler_ready") == 0
    assert value(old, "tokenyard_scheduler_silent_seconds") == 12
    assert value(old, "tokenyard_worker_seconds_since_step", device="cpu", index="0") == 12.5
    assert value(old, "tokenyard_worker_steps_total", device="cpu", index="0") == 40
    assert value(old, "tokenyard_scheduler_preemptions_total") == 4
    gauges = (
        "tokenyard_requests_",
        "tokenyard_kv_",
        "tokenyard_worker_running",
        "tgi_queue",
        "tgi_batch",
        "sglang:num_",
    )
    left = {name for name, _ in old if name.startswith(gauges) and not name.endswith("_total")}
    assert not left


def test_processes_that_hang_are_named(tmp_path: Path) -> None:
    states = {"scheduler": ProcessState(), "api_server:1": ProcessState(time.monotonic() - 20, hangs=2)}
    process_table.write(tmp_path / "processes.json", states)
    known = process_table.read(tmp_path / "processes.json")
    assert known == states
    found = parse(Metrics("m", ["/generate"]).exposition(None, 0.0, False, known).decode())
    assert value(found, "tokenyard_process_silent_seconds", process="scheduler") == 0
    assert 20 <= value(found, "tokenyard_process_silent_seconds", process="api_server:1") < 80
    assert value(found, "tokenyard_process_hangs_total", process="api_server:1") == 2
    assert process_table.read(tmp_path / "none.json") == {}


REPLICA = """
import asyncio, sys
from types import SimpleNamespace
from api_server.metrics.collector import WRITE_SECONDS, Metrics

async def serve(count, is_scraped):
    metrics = Metrics("m", ["/generate"])
    request = SimpleNamespace(request_path="/generate", received=1.0)
    for i in range(count):
        choice = SimpleNamespace(request=request, prompt_tokens=3, completion_tokens=0, cached_tokens=1,
                                 submitted=1.5, first_token=2.0, last_token=4.0, queued=0.125, finish=None)
        metrics.received("/generate")
        metrics.started(choice)
        metrics.tokens(choice, 1, 0.5)
        choice.completion_tokens = 3
        metrics.tokens(choice, 2, 2.0)
        metrics.finished(choice)
    if is_scraped:
        sys.stdout.write(metrics.exposition(None).decode())
    else:
        await asyncio.sleep(5 * WRITE_SECONDS)

asyncio.run(serve(int(sys.argv[1]), sys.argv[2] == "scraped"))
"""


@pytest.mark.slow
def test_any_replica_answers_for_all(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    # The second process counts for the first, which has ended and never was asked; the third for all.
    for count, expected, how in ((2, None, "left alone"), (5, 7, "scraped"), (1, 8, "scraped")):
        done = subprocess.run(
            [sys.executable, "-c", REPLICA, str(count), how],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        if expected is None:
            continue
        found = parse(done.stdout)
        assert value(found, "tokenyard_requests_total", route="/generate", outcome="ok") == expected
        assert value(found, "tokenyard_generation_tokens_total") == 3 * expected
        assert value(found, "tokenyard_prompt_tokens_total") == 3 * expected
        assert value(found, "tokenyard_inter_token_latency_seconds_count") == 2 * expected
        assert value(found, "tokenyard_inter_token_latency_seconds_sum") == 2.0 * expected
        assert value(found, "tokenyard_inter_token_latency_seconds_bucket", le="0.6") == 0
        assert value(found, "tokenyard_inter_token_latency_seconds_bucket", le="1.0") == 2 * expected
        assert value(found, "tokenyard_time_per_output_token_seconds_sum") == 1.0 * expected
        assert value(found, "tokenyard_request_wait_seconds_sum") == 0.5 * expected
        assert value(found, "tokenyard_queue_time_seconds_sum") == 0.125 * expected
        assert value(found, "tgi_request_queue_duration_sum") == 0.125 * expected
        assert value(found, "sglang:queue_time_seconds_count", model_name="m") == expected
        assert value(found, "tgi_request_count") == expected
        assert value(found, "sglang:cache_hit_rate", model_name="m") == pytest.approx(1 / 3)


def test_bounds_cover_what_happens() -> None:
    assert list(TOKEN_SECONDS) == sorted(set(TOKEN_SECONDS))
    assert TOKEN_SECONDS[0] <= 0.0001
    assert TOKEN_SECONDS[-1] >= 5


def test_what_endpoint_pickers_read_has_vllms_names(live: LiveServer) -> None:
    for body in ({"inputs": "Hello"}, {"inputs": "Hello", "parameters": {"max_new_tokens": 1}}):
        httpx.post(live.url + "/generate", json=body)
    workers = [
        WorkerStatus("cpu", 0, 1, 2, 100, 30, 5, steps=40, seconds_since_step=0.5, placed_tokens=90, saved_tokens=60),
        WorkerStatus("cpu", 1, 1, 3, 60, 10, 0, steps=40, seconds_since_step=0.5, placed_tokens=10, saved_tokens=0),
    ]
    adapters = [
        AdapterStatus(number, name, "", "", 8, 100, False, AdapterState.READY, requests, 1)
        for number, (name, requests) in enumerate({"poet": 2, "x": 0}.items(), 1)
    ]
    # More than the workers that are here: another one is lost.
    counters = {"preemptions": 4, "placed_tokens": 150, "saved_tokens": 70}
    status = Status(9, True, "", workers, 7, 5, 4096, 128, 16, 32000, counters, adapters=adapters)
    found = parse(Metrics("m", ["/generate"]).exposition(status).decode())
    names = {"engine": "0", "model_name": "m"}
    for name, expected in {
        "num_requests_waiting": 7,
        "num_requests_running": 5,
        "kv_cache_usage_perc": 0.25,
        "gpu_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 150,
        "prefix_cache_hits_total": 70,
        "num_preemptions_total": 4,
    }.items():
        assert value(found, f"vllm:{name}", **names) == expected, name
    assert value(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="160", **names) == 1
    lora = {"max_lora": "2", "running_lora_adapters": "poet", "waiting_lora_adapters": ""}
    assert value(found, "vllm:lora_requests_info", **lora, **names) == 1
    served = scrape(live)
    names["model_name"] = "tiny-chat"
    for name in ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count"):
        assert value(served, f"vllm:{name}", **names) == value(served, f"tokenyard_{name}") > 0
    gaps = value(served, "tokenyard_inter_token_latency_seconds_count")
    assert value(served, "vllm:time_per_output_token_seconds_count", **names) == gaps
    success = "vllm:request_success_total"
    ended = {name: value(served, success, finished_reason=name, **names) for name in ("stop", "length", "abort")}
    assert ended == {"stop": 1, "length": 1, "abort": 0}
