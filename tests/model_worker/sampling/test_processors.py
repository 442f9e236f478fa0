"""Logits processors of the operator: what they are given, in which order, and what happens when they fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from interfaces import SamplingParams
from interfaces.request.sampling import LogprobMode
from model_worker.sampling.processors import load_processors
from tests.model_worker.tiny_models import tiny_model
from tests.system.in_process import InProcessServer, Shape, load


class Always:
    """Leaves one token."""

    def __call__(self, logits: torch.Tensor, parameters: list[dict[str, Any]]) -> torch.Tensor:
        kept = torch.full_like(logits, -torch.inf)
        for row, values in enumerate(parameters):
            kept[row, values["token"]] = logits[row, values["token"]]
        return kept


class Counting:
    """The next token is the number of tokens before it: it sees prompt and output."""

    def __call__(self, logits: torch.Tensor, parameters: list[dict[str, Any]]) -> torch.Tensor:
        for row, values in enumerate(parameters):
            request = values["__req__"]
            logits[row, len(request.origin_input_ids) * 10 + len(request.output_ids)] = 1e4
        return logits


class Failing:
    def __call__(self, logits: torch.Tensor, parameters: list[dict[str, Any]]) -> torch.Tensor:
        raise RuntimeError("on purpose")


class Narrow:
    def __call__(self, logits: torch.Tensor, parameters: list[dict[str, Any]]) -> torch.Tensor:
        return logits[:, :3]


HERE = __name__
PATHS = {name: f"{HERE}:{name}" for name in ("Always", "Counting", "Failing", "Narrow")}


def run(tmp_path: Path, *requests: tuple[str, dict[str, Any]]) -> InProcessServer:
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    server = InProcessServer(loaded, Shape(processors=load_processors(PATHS)))
    for name, values in requests:
        params = SamplingParams(
            max_new_tokens=6, logit_processor=name, custom_params=json.dumps(values), logprobs=LogprobMode.TEMPERED
        )
        server.submit([5, 6, 7], params)
    server.run()
    return server


def test_each_row_has_its_own_parameters(tmp_path: Path) -> None:
    server = run(tmp_path, ("Always", {"token": 11}), ("", {}), ("Always", {"token": 12}), ("Counting", {}))
    assert server.answers[0].tokens == [11] * 6
    assert server.answers[2].tokens == [12] * 6
    assert server.answers[3].tokens == [30, 31, 32, 33, 34, 35]
    assert len(server.answers[1].tokens) == 6
    assert server.answers[0].logprobs == [0.0] * 6


@pytest.mark.parametrize("name", ["Failing", "Narrow"])
def test_one_that_fails_fails_its_request_alone(tmp_path: Path, name: str) -> None:
    server = run(tmp_path, ("Always", {"token": 11}), (name, {}))
    assert server.answers[0].tokens == [11] * 6
    assert f"the logits processor '{name}' failed" in server.answers[1].error
    assert all(worker.pool.used == 0 for worker in server.scheduler.workers.values())


def test_a_name_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    server = run(tmp_path, ("os.system", {}))
    assert "is not one of" in server.answers[0].error


@pytest.mark.parametrize("path", ["no.such.module:X", f"{HERE}:Missing", "os:path", "os:getcwd"])
def test_what_cannot_be_loaded_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=path.replace(".", r"\.")):
        load_processors({"p": path})
