"""Adapters over HTTP on the scheduler double: loading and unloading, who may, and how each dialect chooses one."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from api_server.chat import images
from api_server.dialects.sglang import adapters as sglang_adapters
from api_server.engine import questions
from api_server.text.tokenizer import Tokenizer
from interfaces import LoRAOperation, LoRAStatus
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, serving
from tests.api_server.scheduler_double import SchedulerDouble

HTTP = httpx.Client(timeout=90)
# A body of each dialect, and where a request's adapter is named in it.
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


def post(live: LiveServer, path: str, body: Any, **more: Any) -> httpx.Response:
    return HTTP.post(live.url + path, json=body, **more)


def make_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(save({"a": np.zeros(2, np.float32)}))
    return folder


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """The folder of --lora-dirs."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    return folder


@pytest.fixture
def live(
    double: SchedulerDouble, run_directory: RunDirectory, tokenizer: Tokenizer, model_directory: Path, adapters: Path
) -> Iterator[LiveServer]:
    settings = Settings(model=str(model_directory), lora_dirs=str(adapters), served_model_name="base")
    with serving(double, run_directory, tokenizer, settings) as server:
        server.state.uploaded_adapters = run_directory.uploaded_adapters
        yield server


def vllm_load(live: LiveServer, name: str, path: object, **more: Any) -> httpx.Response:
    return post(live, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def test_vllms_routes_load_replace_and_unload(live: LiveServer, adapters: Path) -> None:
    folder = make_adapter(adapters / "sql")
    loaded = vllm_load(live, "sql", folder)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    again = vllm_load(live, "sql", folder)
    assert again.status_code == 400
    assert "has already been loaded" in again.json()["error"]["message"]
    assert vllm_load(live, "sql", "sql", load_inplace=True, pinned=True).status_code == 200
    orders = [(order.request.operation, order.request.lora_path) for order in live.double.adapter_orders]
    assert orders == [(LoRAOperation.LOAD, str(folder))] * 3
    assert [(order.replace, order.pinned) for order in live.double.adapter_orders][2] == (True, True)
    gone = post(live, "/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    missing = post(live, "/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "The lora adapter 'sql' cannot be found."


def test_vllms_routes_map_what_the_scheduler_says(live: LiveServer, adapters: Path) -> None:
    folder = make_adapter(adapters / "x")
    for status, code in [
        (LoRAStatus.LOAD_INVALID_ADAPTER, 400),
        (LoRAStatus.LOAD_INVALID_PATH, 404),
        (LoRAStatus.LOAD_ERROR, 500),
    ]:
        live.double.fail_adapter = status, "for this reason"
        response = vllm_load(live, "x", folder)
        assert response.status_code == code
        assert "for this reason" in response.json()["error"]["message"]
    assert vllm_load(live, "x", adapters / "nothing").status_code == 404
    for body in ({"lora_name": "x"}, {"lora_path": "x"}, {"lora_name": 3, "lora_path": "x"}, {}):
        assert post(live, "/v1/load_lora_adapter", body).status_code == 400, body
    assert post(live, "/v1/unload_lora_adapter", {}).status_code == 400


def test_sglangs_routes_load_and_unload(live: LiveServer, adapters: Path) -> None:
    folder = make_adapter(adapters / "team" / "sql")
    loaded = post(live, "/load_lora_adapter", {"lora_name": "sql", "lora_path": str(folder), "pinned": True})
    assert (loaded.status_code, loaded.json()) == (
        200,
        {"success": True, "error_message": None, "loaded_adapters": {"sql": str(folder)}},
    )
    assert live.double.adapter_orders[0].pinned
    refused = post(live, "/load_lora_adapter", {"lora_name": "no", "lora_path": "/etc"})
    assert refused.status_code == 400
    assert refused.json()["success"] is False
    assert refused.json()["loaded_adapters"] == {"sql": str(folder)}
    gone = post(live, "/unload_lora_adapter", {"lora_name": "sql"})
    assert (gone.status_code, gone.json()["loaded_adapters"]) == (200, {})
    missing = post(live, "/unload_lora_adapter", {"lora_name": "sql"})
    assert (missing.status_code, missing.json()["success"]) == (400, False)


def test_sglangs_unload_waits_for_the_requests(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_adapters, "UNLOAD_SECONDS", 0.3)
    live.double.add_adapter("a", "/a")
    live.double.add_adapter("b", "/b")
    live.double.wait(lambda: len(live.state.adapters) == 2)
    live.double.adapter_users = 3
    held = post(live, "/unload_lora_adapter", {"lora_name": "a"})
    assert held.status_code == 400
    assert "3 still use it" in held.json()["error_message"]
    assert held.json()["loaded_adapters"] == {"b": "/b"}


def test_tensors_come_as_safetensors_and_leave_no_file_when_refused(live: LiveServer) -> None:
    weights = save({"w": np.arange(4, dtype=np.float32)})
    body = {"lora_name": "sent", "config_dict": {"r": 4}}
    text = base64.b64encode(weights).decode()
    loaded = post(live, "/load_lora_adapter_from_tensors", body | {"serialized_named_tensors": text})
    assert loaded.json()["success"], loaded.text
    folder = Path(live.double.adapter_orders[0].request.lora_path or "")
    assert json.loads((folder / "adapter_config.json").read_text()) == {"r": 4}
    assert (folder / "adapter_model.safetensors").read_bytes() == weights
    assert oct(folder.stat().st_mode)[-3:] == "700"
    assert oct((folder / "adapter_model.safetensors").stat().st_mode)[-3:] == "600"
    live.double.fail_adapter = LoRAStatus.LOAD_INVALID_ADAPTER, "it fits nothing"
    refused = post(live, "/load_lora_adapter_from_tensors", body | {"serialized_named_tensors": text})
    assert refused.json()["error_message"] == "it fits nothing"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_files_stay_with_the_scheduler_that_has_not_answered(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "SECONDS_TO_LOAD", 0.2)
    live.double.ignore_adapter_orders = True
    text = base64.b64encode(save({"w": np.zeros(4, np.float32)})).decode()
    body = {"lora_name": "sent", "config_dict": {"r": 4}, "serialized_named_tensors": text}
    assert post(live, "/load_lora_adapter_from_tensors", body).status_code == 503
    folder = Path(live.double.adapter_orders[0].request.lora_path or "")
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(live.state.engine.questions, "_send", lambda message: False)
    assert post(live, "/load_lora_adapter_from_tensors", body).status_code == 503
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("data", [pickle.dumps({"a": [1]}), b"", b"\xff" * 40, b"\x10\0\0\0\0\0\0\0[1]"])
def test_pickles_and_other_bytes_are_refused(live: LiveServer, data: bytes) -> None:
    for text in (base64.b64encode(data).decode(), "no base64!"):
        body = {"lora_name": "x", "config_dict": {}, "serialized_named_tensors": text}
        response = post(live, "/load_lora_adapter_from_tensors", body)
        assert response.status_code == 400
        assert "safetensors file in base64" in response.json()["error_message"]
    assert not live.double.adapter_orders


def test_paths_that_lead_elsewhere_are_refused_and_named(live: LiveServer, adapters: Path, tmp_path: Path) -> None:
    outside = make_adapter(tmp_path / "outside")
    inside = make_adapter(adapters / "inside")
    (adapters / "link").symlink_to(outside)
    (adapters / "loop").symlink_to(adapters)
    linked = make_adapter(adapters / "linked")
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(inside / "adapter_model.safetensors")
    old = make_adapter(adapters / "old")
    (old / "adapter_model.safetensors").rename(old / "adapter_model.bin")
    fifo = make_adapter(adapters / "fifo")
    (fifo / "adapter_config.json").unlink()
    os.mkfifo(fifo / "adapter_config.json")
    for path, words in [
        (outside, "not below a folder of lora_dirs"),
        (f"{adapters}/../outside", "neither .. nor NUL"),
        (f"{adapters}/inside/../../outside", "neither .. nor NUL"),
        ("../outside", "neither .. nor NUL"),
        (f"{adapters}/inside\0", "neither .. nor NUL"),
        (adapters / "link", "no link is followed"),
        (adapters / "loop" / "inside", "no link is followed"),
        (adapters / "inside" / "adapter_config.json", "no link is followed"),
        (adapters, "is a folder of lora_dirs itself"),
        (linked, "is not a regular file"),
        (fifo, "is not a regular file"),
        (old, "a pickle"),
    ]:
        response = vllm_load(live, "x", path)
        assert response.status_code == 400, (path, response.text)
        assert words in response.json()["error"]["message"], (path, response.text)
    for name in ("", "a b", "a" * 129, "é", "a\n", "base", "default", "tgi", "dummy"):
        assert vllm_load(live, name, inside).status_code == 400, name
    assert not live.double.adapter_orders
    assert vllm_load(live, "x", inside).status_code == 200


def test_a_server_without_folders_loads_no_path(double: SchedulerDouble, run_directory: RunDirectory,
                                                tokenizer: Tokenizer, model_directory: Path) -> None:  # fmt: skip
    with serving(double, run_directory, tokenizer, Settings(model=str(model_directory))) as live:
        response = vllm_load(live, "x", "/adapters/x")
        assert response.status_code == 400
        assert "--lora-dirs" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter",
    "/load_lora_adapter_from_tensors",
])  # fmt: skip
def test_only_operators_may(live: LiveServer, path: str) -> None:
    response = post(live, path, {"lora_name": "x", "lora_path": "x"}, headers={"x-forwarded-for": "10.0.0.1"})
    assert response.status_code == 403
    assert not live.double.adapter_orders


def test_models_list_adapters_with_their_parent(live: LiveServer) -> None:
    live.double.add_adapter("sql", "/secret/place/sql-v2")
    live.double.wait(lambda: "sql" in live.state.adapters)
    models = {model["id"]: model for model in HTTP.get(live.url + "/v1/models").json()["data"]}
    assert (models["base"]["parent"], models["sql"]["parent"]) == (None, "base")
    assert models["sql"]["root"] == "sql-v2"
    assert HTTP.get(live.url + "/v1/models/sql").json() == models["sql"]
    assert HTTP.get(live.url + "/v1/models/no").status_code == 404
    page = HTTP.get(live.url + "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [model["id"] for model in page["data"]] == ["base", "sql"]
    metrics = HTTP.get(live.url + "/metrics").text
    assert 'tokenyard_adapter_ready{adapter="sql"} 1.0' in metrics


def chosen(live: LiveServer) -> list[tuple[str, str]]:
    found = [(submit.text.adapter, submit.text.adapter_digest) for submit in live.double.submits]
    live.double.submits.clear()
    return found


def test_each_dialect_chooses_an_adapter_its_way(live: LiveServer) -> None:
    for name in ("sql", "fr:v2"):
        live.double.add_adapter(name, f"/{name}")
    live.double.wait(lambda: len(live.state.adapters) == 2)
    sql = ("sql", "digest of /sql")
    french = ("fr:v2", "digest of /fr:v2")
    base = ("", "")
    generate = {"text": "Hello", "sampling_params": {"max_new_tokens": 3}}
    anthropic = {"max_tokens": 5, "messages": CHAT["messages"]}
    for path, body, wanted in [
        ("/v1/chat/completions", CHAT | {"model": "sql"}, [sql]),
        ("/v1/chat/completions", CHAT | {"model": "base:fr:v2"}, [french]),
        ("/v1/chat/completions", CHAT | {"model": "base"}, [base]),
        ("/v1/chat/completions", CHAT | {"model": "base", "lora_path": "sql"}, [sql]),
        ("/v1/completions", {"prompt": ["a", "b"], "model": "fr:v2", "max_tokens": 2}, [french] * 2),
        ("/v1/responses", {"input": "Hello", "model": "sql", "max_output_tokens": 5}, [sql]),
        ("/v1/messages", anthropic | {"model": "sql"}, [sql]),
        ("/generate", generate | {"lora_path": "sql"}, [sql]),
        ("/generate", generate | {"text": ["a", "b", "c"], "lora_path": ["sql", None, "fr:v2"]}, [sql, base, french]),
        ("/generate", generate | {"lora_path": ""}, [base]),
        ("/generate", {"inputs": "Hello", "parameters": {"adapter_id": "fr:v2", "max_new_tokens": 2}}, [french]),
    ]:
        response = post(live, path, body)
        assert response.status_code == 200, (path, response.text)
        assert chosen(live) == wanted, (path, body)
        if path.startswith("/v1/"):
            assert response.json()["model"] == (wanted[0][0] or "base")


def test_unknown_adapters_are_refused_as_each_dialect_does(live: LiveServer) -> None:
    live.double.add_adapter("sql", "/sql")
    live.double.wait(lambda: "sql" in live.state.adapters)
    for path, body, status, words in [
        ("/v1/chat/completions", CHAT | {"model": "sqll"}, 404, "does not exist; this server has 'base', 'sql'"),
        ("/v1/chat/completions", CHAT | {"model": "base:no"}, 404, "does not exist"),
        ("/v1/completions", {"prompt": "a", "lora_path": "no"}, 400, "lora_path must name a loaded adapter"),
        ("/v1/messages", {"max_tokens": 5, "messages": CHAT["messages"], "model": "no"}, 404, "does not exist"),
        ("/generate", {"text": "a", "lora_path": "no"}, 400, "Got LoRA adapter that has never been loaded: 'no'"),
        ("/generate", {"inputs": "a", "parameters": {"adapter_id": "no"}}, 422, "`adapter_id` must name a loaded"),
    ]:
        response = post(live, path, body)
        assert (response.status_code, words in response.text) == (status, True), (path, response.text)
    assert not live.double.submits


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_an_adapter_that_leaves_while_its_request_is_read_is_not_answered_by_the_base(
    live: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.double.add_adapter("sql", "/sql")
    live.double.wait(lambda: "sql" in live.state.adapters)

    async def unload(*_: Any) -> None:
        live.double.adapters = []
        await asyncio.to_thread(live.double.wait, lambda: not live.state.adapters)

    monkeypatch.setattr(images, "load", unload)
    said = {"input": CHAT["messages"]} if path == "/v1/responses" else CHAT
    response = post(live, path, said | {"model": "sql"})
    assert response.status_code == 404, response.text
    assert "'sql' does not exist" in response.text
    assert not live.double.submits


@pytest.mark.slow
def test_an_unanswered_order_says_so_when_the_scheduler_restarts(live: LiveServer, adapters: Path) -> None:
    folder = make_adapter(adapters / "x")
    live.double.ignore_adapter_orders = True

    def restart() -> None:
        live.double.wait(lambda: bool(live.double.adapter_orders))
        live.double.restart()

    thread = threading.Thread(target=restart)
    thread.start()
    response = vllm_load(live, "x", folder)
    thread.join(60)
    assert response.status_code == 503
    assert "restarted before it answered" in response.json()["error"]["message"]
