"""Steps that begin before the last one's tokens are read give the tokens that steps one by one give."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interfaces import Finish, SamplingParams
from interfaces.request.sampling import LogprobMode
from model_worker.execution.flight import Pending
from model_worker.execution.overlap_cpu import OverlapCpu
from model_worker.execution.overlap_cuda import OverlapCuda
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, Shape, load
from tests.system.test_sampled_stability import random_params


def device_params(rng: random.Random) -> SamplingParams:
    """What is sampled without the host."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.6]),
        top_k=rng.choice([-1, 5, 40]),
        top_p=rng.choice([1.0, 0.9, 0.6]),
        min_p=rng.choice([0.0, 0.02]),
        seed=rng.randrange(2**64),
        max_new_tokens=rng.randint(1, 24),
        stop_token_ids=[rng.randrange(VOCAB) for _ in range(4)],
    )


def host_params(rng: random.Random) -> SamplingParams:
    """What needs the host, each thing for itself."""
    fields: dict[str, Any] = rng.choice(
        [
            {"logprobs": LogprobMode.TEMPERED},
            {"logprobs": LogprobMode.WARPED, "top_logprobs": 3},
            {"prompt_logprobs_from": 1, "logprobs": LogprobMode.TEMPERED},
            {"min_new_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 3))},
            {"logit_bias": {5: 4.0}},
            {"bad_words": [[7], [8, 9]]},
            {"typical_p": 0.7},
            {"watermark": True},
        ]
    )
    return SamplingParams(seed=rng.randrange(2**64), max_new_tokens=rng.randint(10, 20), **fields)


def greedy_params(rng: random.Random) -> SamplingParams:
    """What the largest logit is enough for."""
    return SamplingParams(
        temperature=0.0, max_new_tokens=rng.randint(1, 24), stop_token_ids=[rng.randrange(VOCAB) for _ in range(4)]
    )


# Two that together need more blocks than there are, and one that ends at its first token.
GROWING = [([token], SamplingParams(temperature=0.0, max_new_tokens=60)) for token in (5, 6)]
STOPPING = ([7], SamplingParams(temperature=0.0, max_new_tokens=5, stop_token_ids=list(range(VOCAB))))


ON_DEVICE = ("olmo2", Shape(num_blocks=24), Shape(num_blocks=24, device_overlap="cuda"))
"""As on CUDA, with torch's CPU as the device."""
IN_STACK = ("llama", Shape(num_blocks=5, block_size=16), Shape(num_blocks=5, block_size=16, device_overlap="cpu"))


@pytest.mark.parametrize(
    ("where", "kinds"),
    [
        (ON_DEVICE, (device_params,)),
        (ON_DEVICE, (device_params, device_params, random_params, host_params)),
        (IN_STACK, (greedy_params,)),
        (IN_STACK, (greedy_params, greedy_params, device_params, host_params)),
    ],
)
def test_the_host_being_behind_changes_nothing(
    where: tuple[str, Shape, Shape], kinds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    architecture, *shapes = where
    loaded = load(tiny_model(architecture, tmp_path, seed=1))
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(24)]
    asked = [*GROWING, STOPPING, *((prompt, rng.choice(kinds)(rng)) for prompt in prompts)]
    behind: list[int] = []
    overlap: Any = OverlapCpu if where is IN_STACK else OverlapCuda
    launch = overlap.launch

    def counted(executor: Any, *arguments: Any) -> Pending:
        behind.append(len(executor._shared.in_flight))
        pending: Pending = launch(executor, *arguments)
        return pending

    monkeypatch.setattr(overlap, "launch", counted)
    answers = []
    for shape in shapes:
        assert not behind, "only the second engine runs ahead"
        server = InProcessServer(loaded, shape)
        for prompt, params in asked:
            server.submit(prompt, params)
        answers.append(server.run())
    assert behind, "some steps were meant to need no host"
    assert len(kinds) > 1 or max(behind) == 1, "two steps were meant to be in flight"
    plain, early = answers
    for one, other, (_, params) in zip(plain, early, asked, strict=True):
        assert one.tokens == other.tokens, f"seed {seed}"
        assert one.finished == other.finished
        if params.logprobs:
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
        assert one.reports.keys() == other.reports.keys()
    assert {answer.finished for answer in plain} == {Finish.STOP, Finish.LENGTH}
    assert server.scheduler.counters["preemptions"] > 0
