"""Weights that change on real processes: answers are those of transformers with the weights that are served."""

from __future__ import annotations

import base64
import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from transformers import AutoModelForCausalLM

from tests.system.server import Server, free_port

# Longer than a block, so that its beginning is found in the cache.
PROMPT = [7 + i * 11 % 400 for i in range(40)]
LENGTH = 16
STREAMS = 8
LONG = 200
# More than any test waits for.
ENDLESS = 4000


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` and `b`: the served model with other random numbers. Folders that cannot be used lie beside them."""
    root = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate("ab", start=1):
        shutil.copytree(model, root / name)
        tensors = load_file(root / name / "model.safetensors")
        draws = torch.Generator().manual_seed(seed)
        changed = {key: _other(key, tensor, draws) for key, tensor in tensors.items()}
        save_file(changed, root / name / "model.safetensors", metadata={"format": "pt"})
    return root


def _other(name: str, tensor: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    """Permute the inputs of projections: other numbers of the same size; the rest is left, so that no text ends."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight")):
        return tensor
    return tensor[:, torch.randperm(tensor.shape[1], generator=draws)].contiguous()


@pytest.fixture(scope="module")
def server(model: Path, folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--dtype", "float32", "--kv-memory", "64MB", "--max-running", "8", "--weights-dirs", str(folders)]
    with Server(model, flags, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture(autouse=True)
def own_weights(server: Server, model: Path) -> Iterator[None]:
    """After each test the model's own weights are served, and requests run."""
    yield
    post(server, "/continue_generation")
    done = post(server, "/update_weights_from_disk", model_path=str(model), weight_version="default", running="abort")
    assert done.status_code == 200, done.text


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def update(server: Server, path: Path | str, **more: Any) -> dict[str, Any]:
    answer = post(server, "/update_weights_from_disk", model_path=str(path), **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def truth(path: Path, prompt: list[int] = PROMPT, length: int = LENGTH) -> list[int]:
    """The greedy tokens of transformers."""
    reference = model_of(path)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        # Without a mask token 0 in the prompt would count as padding.
        whole = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        out = reference.generate(ids, max_new_tokens=length, do_sample=False, **whole)
    return [int(token) for token in out[0, len(prompt) :]]


@functools.cache
def model_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def ask(server: Server, prompt: list[int] = PROMPT, length: int = LENGTH, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    answer = post(server, "/generate", input_ids=prompt, sampling_params=sampling, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_each_version_answers_as_transformers_do(server: Server, model: Path, folders: Path) -> None:
    """Also on a warm cache, and back again."""
    expected = {path: truth(path) for path in (model, folders / "a", folders / "b")}
    assert len(set(map(tuple, expected.values()))) == 3
    ask(server)
    for name, path in (("one", folders / "a"), ("two", folders / "b"), ("three", model), ("four", folders / "a")):
        done = update(server, path, weight_version=name)
        assert (done["success"], done["weight_version"]) == (True, name)
        cold = ask(server)
        assert cold["output_ids"] == expected[path]
        assert (cold["meta_info"]["weight_version"], cold["meta_info"]["cached_tokens"]) == (name, 0)
        warm = ask(server)
        assert (warm["output_ids"], warm["meta_info"]["cached_tokens"] > 0) == (expected[path], True)
        assert httpx.get(f"{server.url}/model_info").json()["weight_version"] == name


def test_running_requests_wait_go_on_are_computed_again_or_end(server: Server, model: Path, folders: Path) -> None:
    prompts = [[(7 + i + n * 13) % 400 for i in range(20)] for n in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        for mode in ("wait", "retract", "in_place", "abort"):
            update(server, model, weight_version="old", running="abort")
            seen = [Seen() for _ in prompts]
            length = ENDLESS if mode != "wait" else LONG
            asked = zip(prompts, seen, strict=True)
            running = [threads.submit(stream, server, prompt, one, length) for prompt, one in asked]
            server.wait_for("the streams", 30, lambda seen=seen: all(one.events for one in seen))
            update(server, folders / "a", weight_version="new", running=mode)
            if mode in ("retract", "in_place"):
                more = [(one, one.events) for one in seen]
                server.wait_for("more", 30, lambda more=more: all(one.events > count + 2 for one, count in more))
                post(server, "/abort_request", abort_all=True)
            for prompt, answer in zip(prompts, [one.result() for one in running], strict=True):
                check_mode(mode, prompt, answer, model, folders / "a")
            assert ask(server)["output_ids"] == truth(folders / "a")


def check_mode(mode: str, prompt: list[int], answer: dict[str, Any], old: Path, new: Path) -> None:
    meta = answer["meta_info"]
    tokens = answer["output_ids"]
    if mode == "wait":
        assert (len(tokens), meta["weight_version"], "weight_versions" in meta) == (LONG, "old", False)
        assert tokens[:LENGTH] == truth(old, prompt)
    elif mode == "abort":
        assert (meta["finish_reason"]["type"], meta["weight_version"]) == ("abort", "old")
        assert tokens[:LENGTH] == truth(old, prompt)[: len(tokens)]
    else:
        assert meta["weight_version"] == "new"
        first, second = meta["weight_versions"]
        assert (first["weight_version"], second["weight_version"]) == ("old", "new")
        changed = second["first_token"]
        assert 0 < changed < len(tokens)
        assert tokens[:changed][:LENGTH] == truth(old, prompt)[:changed]
        if mode == "retract":
            after = tokens[changed : changed + LENGTH]
            assert after == truth(new, prompt + tokens[:changed], len(after))


@dataclass
class Seen:
    """How many events of a stream have come."""

    events: int = 0


def stream(server: Server, prompt: list[int], seen: Seen, length: int) -> dict[str, Any]:
    """Ask for a long answer as a stream. Returns its last event."""
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    last = ""
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seen.events += 1
                last = line.removeprefix("data: ")
    found: dict[str, Any] = json.loads(last)
    return found


def test_pause_keeps_requests_for_the_new_weights(server: Server, model: Path, folders: Path) -> None:
    """As a trainer does it: pause, update, go on."""
    with ThreadPoolExecutor(1) as threads:
        assert httpx.post(f"{server.url}/pause?mode=keep").json() == {"status": "paused"}
        waiting = threads.submit(ask, server)
        update(server, folders / "b", weight_version="b")
        assert not waiting.done()
        assert httpx.post(f"{server.url}/resume").json() == {"status": "resumed"}
        answer = waiting.result()
    assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (truth(folders / "b"), "b")


def test_tensors_of_the_request_take_the_place_of_those_of_their_names(
    server: Server, model: Path, folders: Path, tmp_path: Path
) -> None:
    tensors = load_file(folders / "a" / "model.safetensors")
    changed = {name: tensor for name, tensor in tensors.items() if "layers.1." in name}
    mixed = tmp_path / "mixed"
    shutil.copytree(model, mixed)
    save_file(load_file(model / "model.safetensors") | changed, mixed / "model.safetensors", metadata={"format": "pt"})
    halves = [dict(list(changed.items())[i::2]) for i in range(2)]
    sent = [base64.b64encode(save(half)).decode() for half in halves]
    held = post(server, "/update_weights_from_tensor", serialized_named_tensors=sent[:1], hold=True)
    assert held.status_code == 200, held.text
    assert ask(server)["output_ids"] == truth(model)
    done = post(server, "/update_weights_from_tensor", serialized_named_tensors=sent[1:], weight_version="sent")
    assert done.status_code == 200, done.text
    assert ask(server)["output_ids"] == truth(mixed) != truth(model)
    name = "model.layers.1.self_attn.q_proj.weight"
    rows = httpx.request("GET", f"{server.url}/get_weights_by_name", json={"name": name, "truncate_size": 3}).json()
    assert rows == changed[name][:3].tolist()
    # A worker that is started after a death reads them again.
    server.child("model_worker").send_signal(signal.SIGKILL)
    answer = ask(server)
    assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (truth(mixed), "sent")


# A trainer: it meets the server in a group of its own, and sends the tensors of a file, in the order of their names.
TRAINER = """
import os
import sys
from datetime import timedelta
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

port, path, rounds = sys.argv[1:]
timeout = timedelta(seconds=60)
store, _, _ = next(iter(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout)))
named = c10d.PrefixStore("trainers", store)
group, _ = c10d._new_process_group_helper(2, 0, [], "gloo", named, group_name="trainers", timeout=timeout)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
for _ in range(int(rounds)):
    for _, tensor in sorted(load_file(path).items()):
        dist.broadcast(tensor, group_src=0, group=group)
sys.stdin.read()
os._exit(0)
"""


def test_a_trainer_sends_tensors_over_a_group(server: Server, model: Path, folders: Path) -> None:
    """Over SGLang's routes all at once, and over vLLM's in two messages."""
    path = folders / "b" / "model.safetensors"
    tensors = sorted(load_file(path).items())
    port = free_port()
    command = [sys.executable, "-c", TRAINER, str(port), str(path), "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trainer:
        group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        joined = post(server, "/init_weights_update_group", **group, group_name="trainers")
        assert joined.status_code == 200, joined.text
        columns: dict[str, list[Any]] = {
            "names": [name for name, _ in tensors],
            "dtypes": ["float32"] * len(tensors),
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }
        done = post(server, "/update_weights_from_distributed", **columns, group_name="trainers", weight_version="sent")
        assert done.status_code == 200, done.text
        answer = ask(server)
        assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (truth(folders / "b"), "sent")
        update(server, model)
        assert httpx.get(f"{server.url}/get_world_size").json() == {"world_size": 1}
        assert post(server, "/start_weight_update", is_checkpoint_format=True).status_code == 200
        half = len(tensors) // 2
        for part in (slice(None, half), slice(half, None)):
            info = {"group_name": "trainers", "dtype_names": columns["dtypes"][part]}
            info |= {name: columns[name][part] for name in ("names", "shapes")}
            sent = post(server, "/update_weights", update_info=info)
            assert sent.status_code == 200, sent.text
            assert ask(server)["output_ids"] == truth(model)
        assert post(server, "/finish_weight_update", weight_version="again").json()["weight_version"] == "again"
        assert ask(server)["output_ids"] == truth(folders / "b")
        assert post(server, "/destroy_weights_update_group", group_name="trainers").status_code == 200
        _, errors = trainer.communicate(timeout=60)
        assert trainer.returncode == 0, errors


def test_a_killed_worker_comes_back_with_the_version_that_is_served(server: Server, folders: Path) -> None:
    update(server, folders / "b", weight_version="b")
    with ThreadPoolExecutor(1) as threads:
        seen = Seen()
        running = threads.submit(stream, server, PROMPT, seen, LONG)
        server.wait_for("the stream", 30, lambda: seen.events)
        server.child("model_worker").send_signal(signal.SIGKILL)
        answer = running.result()
    assert answer["output_ids"] == truth(folders / "b", PROMPT, LONG)
    assert "weight_versions" not in answer["meta_info"]
    assert answer["meta_info"]["weight_version"] == "b"
    server.child("scheduler").send_signal(signal.SIGKILL)
    assert ask(server)["output_ids"] == truth(folders / "b")
    assert ask(server)["meta_info"]["weight_version"] == "b"


def test_a_failed_update_leaves_the_old_weights_serving(
    server: Server, model: Path, folders: Path, tmp_path: Path
) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    broken = {
        "shape": tensors | {name: tensors[name][:-1].contiguous()},
        "missing": {key: tensor for key, tensor in tensors.items() if key != name},
    }
    for kind, content in broken.items():
        shutil.copytree(model, folders / kind)
        save_file(content, folders / kind / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(model, folders / "cut")
    whole = (model / "model.safetensors").read_bytes()
    (folders / "cut" / "model.safetensors").write_bytes(whole[:-100])
    shutil.copytree(model, folders / "other")
    config = (model / "config.json").read_text()
    (folders / "other" / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    (folders / "cut.gguf").write_bytes(b"GGUF\3\0\0\0\1")
    (folders / "link").symlink_to(model)
    worker = server.child("model_worker").pid

    def refused(path: str, *parts: str, **body: Any) -> None:
        answer = post(server, path, **body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["success"] is False
        for part in parts:
            assert part in answer.json()["message"], answer.text

    disk = "/update_weights_from_disk"
    refused(disk, name, "[63, 48]", model_path=str(folders / "shape"))
    refused(disk, name, model_path=str(folders / "missing"))
    refused(disk, "model.safetensors", model_path=str(folders / "cut"))
    refused(disk, "cut.gguf", model_path="cut.gguf")
    refused(disk, "layers 2", "served 3", model_path=str(folders / "other"))
    refused(disk, "--weights-dirs", model_path=str(tmp_path))
    refused(disk, "--weights-dirs", model_path=str(folders / "link"))
    refused(disk, "..", model_path="../x")
    refused(disk, "there is nothing", model_path="nothing")
    refused(disk, "pickles", model_path=str(folders / "a"), load_format="pt")

    def refused_tensors(given: dict[str, torch.Tensor], *parts: str) -> None:
        text = base64.b64encode(save(given)).decode()
        refused("/update_weights_from_tensor", *parts, serialized_named_tensors=[text])

    refused_tensors({name: tensors[name][:-1].contiguous()}, name, "[63, 48]", "[64, 48]")
    refused_tensors({name: tensors[name].to(torch.int32)}, name, "I32")
    refused_tensors({"model.nothing.weight": tensors[name]}, "model.nothing.weight")
    refused_tensors({name: torch.full_like(tensors[name], torch.nan)}, "not finite", name)
    deep = b'{"a":' + b"[" * 100_000
    text = base64.b64encode(len(deep).to_bytes(8, "little") + deep).decode()
    refused("/update_weights_from_tensor", serialized_named_tensors=[text])
    pickle = base64.b64encode(b"\x80\x04\x95" + b"\0" * 64).decode()
    refused("/update_weights_from_tensor", "pickles", serialized_named_tensors=[pickle])
    refused("/update_weights_from_distributed", "no group", names=["x"], dtypes=["float32"], shapes=[[1]])
    assert ask(server)["output_ids"] == truth(model)
    assert httpx.get(f"{server.url}/weight_version").json() == {"weight_version": "default"}
    assert server.child("model_worker").pid == worker


def test_sleep_gives_memory_back_and_waking_gives_equal_tokens(server: Server, model: Path, folders: Path) -> None:
    """Level 1 gives the K and V back, level 2 the weights, too. A request that runs or comes meanwhile is computed."""
    expected = truth(model)
    pid = server.child("model_worker").pid
    for level in (1, 2):
        for n in range(8):
            ask(server, [(n * 31 + i) % 400 for i in range(2000)], 2)
        worker = psutil.Process(server.child("model_worker").pid)
        before = worker.memory_info().rss
        assert httpx.post(f"{server.url}/sleep?level={level}").json() == {"status": "sleeping"}
        assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
        assert worker.memory_info().rss < before - (8 << 20)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(ask, server)
            time.sleep(0.3)
            assert not waiting.done()
            if level == 2:
                assert httpx.post(f"{server.url}/wake_up?tags=weights").json() == {"status": "awake"}
                assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
            assert httpx.post(f"{server.url}/wake_up").json() == {"status": "awake"}
            assert waiting.result()["output_ids"] == expected
    post(server, "/release_memory_occupation", tags=["weights"])
    update(server, folders / "a")
    assert ask(server)["output_ids"] == truth(folders / "a")
    assert server.child("model_worker").pid == pid
