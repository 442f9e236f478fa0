"""Logits processors on real processes: named over HTTP, checked at the door, and the same bytes through kills."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.server import Server

PROCESSORS = "tests.model_worker.sampling.test_processors"
# So that both answers are under way when a process is killed.
LENGTH = 300
PROMPT = [5, 6, 7]
PROMPTS = "tokenyard_prompt_tokens_total"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    entries = f"{PROCESSORS},avoid={PROCESSORS}:Avoiding"
    flags = ["--dtype", "float32", "--kv-memory", "16MB", "--logit-processors", entries]
    with Server(model, flags, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120)


def tokens(server: Server, length: int, **body: Any) -> list[int]:
    sampling = {"max_new_tokens": length, "ignore_eos": True, "sampling_seed": 3, **body.pop("sampling_params", {})}
    response = post(server, "/generate", input_ids=PROMPT, sampling_params=sampling, **body)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["output_ids"]
    return ids


def test_the_interface_documents_forms_over_http(server: Server) -> None:
    named = {"custom_logit_processor": "of-module", "sampling_params": {"custom_params": {"base": 20}}}
    assert tokens(server, 5, **named) == [23, 24, 25, 26, 27]
    batch = {"custom_logit_processor": "other", "sampling_params": {"custom_params": {"base": 30}}}
    assert tokens(server, 5, **batch) == [30, 31, 32, 33, 34]
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True, "vllm_xargs": {"base": 40}}
    assert post(server, "/v1/completions", **body).json()["choices"][0]["token_ids"] == [43, 44, 45, 46]
    wrong = {"custom_logit_processor": "of-module", "sampling_params": {"custom_params": {"base": "x"}}}
    refused = post(server, "/generate", input_ids=[5], **wrong)
    assert refused.status_code == 400
    assert "sampling_params.custom_params.base must be an integer" in refused.json()["error"]["message"]


@pytest.mark.parametrize("module", ["model_worker", "scheduler"])
def test_a_killed_process_changes_no_byte(server: Server, module: str) -> None:
    """One that sees all tokens so far, and a drawn answer whose logits another has changed."""
    asked: list[dict[str, Any]] = [
        {"custom_logit_processor": "other", "sampling_params": {"custom_params": {"base": 10}}},
        {"custom_logit_processor": "avoid", "sampling_params": {"temperature": 1.0}},
    ]
    undisturbed = [tokens(server, LENGTH, **body) for body in asked]
    assert undisturbed[0] == list(range(10, 10 + LENGTH))
    prompts = server.total(PROMPTS)
    with ThreadPoolExecutor(2) as pool:
        disturbed = [pool.submit(tokens, server, LENGTH, **body) for body in asked]
        server.wait_for("both are submitted", 60, lambda: server.total(PROMPTS) == prompts + 2 * len(PROMPT))
        server.child(module).send_signal(signal.SIGKILL)
        assert [each.result() for each in disturbed] == undisturbed
