"""Adapters on real processes: answers are those of merged weights, whatever is loaded, unloaded or killed meanwhile."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.chaos.adapters import churn
from tests.model_worker.adapters.made import Made, Recipe, make
from tests.system.server import Server
from tests.system.test_resilience import last_frame

NAMES = ("start", "one", "two", "three", "four")
# Only in the batch of many.
MORE = ("five", "six", "seven")
# Longer than a block, so that its beginning is found in the cache.
PROMPT = [7 + i * 11 % 400 for i in range(40)]
LENGTH = 24
EVICTIONS = "tokenyard_scheduler_adapter_evictions_total"


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """Adapters in one folder. `start` is what the server starts with; `model` is the base, without its folder."""
    folder = tmp_path_factory.mktemp("adapters")
    ranks = {name: 2 + i % len(NAMES) for i, name in enumerate((*NAMES, *MORE))}
    return {name: make(model, folder / name, Recipe(rank=rank), seed=i) for i, (name, rank) in enumerate(ranks.items())}


@pytest.fixture(scope="module")
def server(model: Path, adapters: dict[str, Made], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = adapters["start"].folder
    flags = [
        "--dtype",
        "float32",
        "--kv-memory",
        "16MB",
        "--lora",
        f"start={folder}",
        "--lora-dirs",
        str(folder.parent),
    ]
    # Room for about two of them.
    with Server(model, [*flags, "--lora-memory", "100KB"], tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture(autouse=True)
def only_start(server: Server) -> Iterator[None]:
    """After each test only the adapter of the start is there."""
    yield
    for name in names(server) - {"start"}:
        post(server, "/v1/unload_lora_adapter", lora_name=name)


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def names(server: Server) -> set[str]:
    models = httpx.get(f"{server.url}/v1/models", timeout=90).json()["data"]
    return {each["id"] for each in models if each["parent"]}


def load(server: Server, name: str, made: Made, **more: Any) -> None:
    response = post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(made.folder), **more)
    assert response.status_code == 200, response.text


def truth(merged: Any, prompt: list[int], length: int = LENGTH) -> list[int]:
    """The greedy tokens of transformers."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = merged.generate(ids, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in out[0, len(prompt) :]]


def generate(server: Server, prompts: list[list[int]], lora_path: list[str | None], length: int = LENGTH) -> list[Any]:
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    response = post(server, "/generate", input_ids=prompts, lora_path=lora_path, sampling_params=sampling)
    assert response.status_code == 200, response.text
    return [answer["output_ids"] for answer in response.json()]


def test_adapters_and_the_base_in_one_batch_are_as_merged_weights(
    server: Server, model: Path, adapters: dict[str, Made]
) -> None:
    assert names(server) == {"start"}
    load(server, "one", adapters["one"])
    base = make(model, adapters["start"].folder.parent / "none", Recipe(targets=()), seed=0).merged
    shutil.rmtree(adapters["start"].folder.parent / "none")
    prompts = [PROMPT[i % 3 :] for i in range(9)]
    asked: list[str | None] = ["start", None, "one"] * 3
    merged = {"start": adapters["start"].merged, "one": adapters["one"].merged, None: base}
    wanted = [truth(merged[name], prompt) for name, prompt in zip(asked, prompts, strict=True)]
    assert generate(server, prompts, asked) == wanted
    assert len({str(tokens) for tokens in wanted}) >= 3, "adapters were meant to change answers"
    # Again, from the cache, and in another company.
    assert generate(server, prompts[:4], asked[:4]) == wanted[:4]


def test_another_content_under_a_name_is_served_from_the_next_request_on(
    server: Server, adapters: dict[str, Made]
) -> None:
    load(server, "a", adapters["one"])
    assert generate(server, [PROMPT], ["a"]) == [truth(adapters["one"].merged, PROMPT)]
    load(server, "a", adapters["two"], load_inplace=True)
    assert generate(server, [PROMPT], ["a"]) == [truth(adapters["two"].merged, PROMPT)]
    load(server, "a", adapters["one"], load_inplace=True)
    assert generate(server, [PROMPT], ["a"]) == [truth(adapters["one"].merged, PROMPT)]


def test_more_adapters_than_fit_are_all_served(server: Server, adapters: dict[str, Made]) -> None:
    for name in NAMES[1:]:
        load(server, name, adapters[name])
    evictions = server.total(EVICTIONS)
    with ThreadPoolExecutor(len(NAMES)) as pool:
        for _ in range(2):
            found = pool.map(lambda name: generate(server, [PROMPT], [name])[0], NAMES)
            assert list(found) == [truth(adapters[name].merged, PROMPT) for name in NAMES]
    server.wait_for("evictions in the status", 60, lambda: server.total(EVICTIONS) > evictions)


def test_unloading_under_use_lets_requests_end(server: Server, adapters: dict[str, Made]) -> None:
    load(server, "a", adapters["one"])
    response, connection = stream(server, "a", 300)
    gone: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: gone.append(post(server, "/unload_lora_adapter", lora_name="a")))
    frame = last_frame(response, lambda count: thread.start() if count == 3 else None)
    thread.join(60)
    connection.close()
    assert frame["output_ids"] == truth(adapters["one"].merged, PROMPT, 300)
    assert gone[0].json()["success"], gone[0].text
    assert "a" not in gone[0].json()["loaded_adapters"]
    refused = post(server, "/v1/completions", model="a", prompt="x")
    assert refused.status_code == 404


def stream(server: Server, name: str, length: int) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
    body = {
        "input_ids": PROMPT,
        "lora_path": name,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse(), connection


def test_what_cannot_be_an_adapter_is_refused_with_the_reason(server: Server, adapters: dict[str, Made]) -> None:
    folder = adapters["one"].folder.parent / "strange"
    shutil.copytree(adapters["one"].folder, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"layer_replication": [[0, 1]]}))
    response = post(server, "/v1/load_lora_adapter", lora_name="x", lora_path=str(folder))
    assert response.status_code == 400
    assert "layer_replication" in response.json()["error"]["message"]
    shutil.rmtree(folder)
    assert names(server) == {"start"}


@pytest.mark.parametrize("module", ["model_worker", "scheduler"])
def test_a_killed_process_changes_no_token_and_forgets_no_adapter(
    server: Server, adapters: dict[str, Made], module: str
) -> None:
    load(server, "a", adapters["one"])
    load(server, "b", adapters["two"])
    response, connection = stream(server, "a", 400)

    def disturb(count: int) -> None:
        if count == 20:
            # The requests under way keep the content that has lost its name.
            load(server, "a", adapters["three"], load_inplace=True)
            server.child(module).send_signal(signal.SIGKILL)

    frame = last_frame(response, disturb)
    connection.close()
    assert frame["output_ids"] == truth(adapters["one"].merged, PROMPT, 400)
    # It is ready by a status of before the death until the death is noticed.
    server.wait_for("the adapters", 60, lambda: server.is_ready() and names(server) == {"start", "a", "b"})
    answers = generate(server, [PROMPT] * 3, ["start", "a", "b"])
    assert answers == [truth(adapters[name].merged, PROMPT) for name in ("start", "three", "two")]


def test_loads_and_unloads_disturb_no_stream(server: Server, adapters: dict[str, Made]) -> None:
    """The short form of `python -m tests.chaos adapters`, with a killed worker in its middle."""
    load(server, "a", adapters["one"])

    def disturb(number: int) -> None:
        if number == 5:
            server.child("model_worker").send_signal(signal.SIGKILL)

    folders = [adapters[name].folder for name in ("two", "three", "four")]
    found = churn(server, [None, "start", "a"], folders, loads=10, streams=6, disturb=disturb)
    assert found.loads == 10
    assert found.streams >= 6
    assert not found.changed, found.changed


def test_32_requests_over_8_adapters_and_none_are_as_one_by_one(server: Server, adapters: dict[str, Made]) -> None:
    for name in (*NAMES[1:], *MORE):
        load(server, name, adapters[name])
    assert len(names(server)) == 8
    asked: list[str | None] = [(None, *NAMES, *MORE)[i % 9] for i in range(32)]
    prompts = [[9 + (i * 7 + j * 3) % 400 for j in range(5 + i)] for i in range(32)]
    together = generate(server, prompts, asked, 12)
    alone = [generate(server, [prompt], [name], 12)[0] for prompt, name in zip(prompts, asked, strict=True)]
    assert together == alone


def test_why_names_the_adapter(server: Server) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": "start", "prompt": "x", "max_tokens": 2},
        headers={"x-request-id": "asked-why"},
        timeout=90,
    )
    assert answer.json()["model"] == "start"
    command = [sys.executable, "-m", "deploy.cli", "why", "asked-why"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert "adapter 'start'" in found.stdout
