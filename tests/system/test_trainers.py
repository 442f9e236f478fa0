"""Trainers' clients and two workers: TRL's own client generates and sends weights, and both workers change at once."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.system.server import Server, free_port
from tests.system.test_weights import LENGTH, PROMPT, ask, post, truth, update

pytest.importorskip("trl", reason="`make setup-test` installs TRL's client")

FIRST_NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model after a step of training: its queries' inputs are permuted."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    draws = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "gate_proj.weight")):
            tensors[name] = tensor[:, torch.randperm(tensor.shape[1], generator=draws)].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def server(model: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--dtype", "float32", "--kv-memory", "16MB", "--devices", "cpu,cpu", "--weights-dirs", str(trained.parent)]
    with Server(model, flags, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


def answers(server: Server, count: int = 6) -> list[list[int]]:
    """The tokens of requests that run at once, so that both workers get some."""
    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(lambda _: ask(server), range(count)))
    return [answer["output_ids"] for answer in found]


def test_trls_client_generates_and_sends_weights(server: Server, model: Path, trained: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.system.trl_trainer", server.url, str(port), str(trained)]
    ran = subprocess.run(
        [*command, json.dumps(PROMPT), str(LENGTH)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    last = tmp_path / "last"
    shutil.copytree(trained, last)
    tensors = load_file(last / "model.safetensors")
    tensors[FIRST_NORM] = torch.zeros_like(tensors[FIRST_NORM])
    save_file(tensors, last / "model.safetensors", metadata={"format": "pt"})
    expected = [truth(model), truth(trained), truth(last)]
    assert [answer["prompt_ids"] for answer in found] == [[PROMPT]] * 3
    assert [answer["completion_ids"][0] for answer in found] == expected
    assert len(set(map(tuple, expected))) == 3
    for answer in found:
        assert answer["logprob_token_ids"][0] == [[token] for token in answer["completion_ids"][0]]
        assert all(-10 < value <= 0 for (value,) in answer["logprobs"][0])
    assert answers(server) == [expected[-1]] * 6


def test_a_version_is_served_by_both_workers_or_by_none(server: Server, model: Path, trained: Path) -> None:
    update(server, model, running="abort")
    assert answers(server) == [truth(model)] * 6
    update(server, trained, weight_version="trained", running="in_place")
    assert answers(server) == [truth(trained)] * 6
    cut = trained.parent / "cut"
    shutil.copytree(trained, cut)
    (cut / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes()[:-100])
    refused = post(server, "/update_weights_from_disk", model_path=str(cut))
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert answers(server) == [truth(trained)] * 6
    # Both come back with the version that is served.
    for worker in [server.child("model_worker", nth) for nth in range(2)]:
        worker.send_signal(signal.SIGKILL)
    assert answers(server) == [truth(trained)] * 6
