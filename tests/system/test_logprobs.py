"""Log-probabilities of answers and prompts against a float32 forward of transformers, however the work was cut up."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interfaces import SamplingParams
from interfaces.request.sampling import LogprobMode
from model_worker.model import LoadedModel
from tests.model_worker.recurrent.tiny_hybrids import HYBRIDS, tiny_hybrid
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import Answer, InProcessServer, Shape, load

NEW_TOKENS = 16
TOLERANCE = 1e-4


def log_softmax(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """[T, vocab]: row i is of the token at index i + 1, by the model's own attention."""
    model: Any = loaded.model
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    model.set_attn_implementation(ours)
    return torch.log_softmax(logits.double(), -1)


def random_requests(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    shared = [rng.randrange(3, VOCAB) for _ in range(20)]
    requests = []
    for _ in range(14):
        prompt = shared[: rng.choice([0, 9, 20])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            logprobs=LogprobMode.TEMPERED,
            max_new_tokens=NEW_TOKENS,
            top_logprobs=rng.choice([0, 1, 5, 64]),
            logprob_ids=rng.sample(range(VOCAB), rng.choice([0, 1, 7])),
            prompt_logprobs_from=rng.choice([None, 0, 0, rng.randint(0, len(prompt))]),
        )
        requests.append((prompt, params))
    return requests


def check(loaded: LoadedModel, prompt: list[int], params: SamplingParams, answer: Answer) -> None:
    tokens = prompt + answer.tokens
    wanted = log_softmax(loaded, tokens)
    own = [float(wanted[len(prompt) + i - 1, token]) for i, token in enumerate(answer.tokens)]
    np.testing.assert_allclose(answer.logprobs, own, atol=TOLERANCE)
    start = len(prompt) if params.prompt_logprobs_from is None else max(1, params.prompt_logprobs_from)
    positions = list(range(start, len(prompt)))
    if params.top_logprobs or params.logprob_ids:
        positions += range(len(prompt), len(tokens))
    assert sorted(answer.reports) == positions
    for position, report in answer.reports.items():
        row = wanted[position - 1]
        assert report.token_log_probabilities[0] == pytest.approx(float(row[tokens[position]]), abs=TOLERANCE)
        top, asked = report.top_log_probabilities[0], report.asked_log_probabilities[0]
        expected = torch.topk(row, params.top_logprobs).values.tolist()
        np.testing.assert_allclose(list(top.values()), expected, atol=TOLERANCE)
        assert list(asked) == params.logprob_ids
        for token, value in (top | asked).items():
            assert value == pytest.approx(float(row[token]), abs=TOLERANCE)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3_moe", "granitemoehybrid"])
def test_all_reports_equal_transformers(arch: str, tmp_path: Path) -> None:
    """Small chunks, few blocks, a warm prefix cache and two workers change nothing, and neither does preemption."""
    loaded = load((tiny_hybrid if arch in HYBRIDS else tiny_model)(arch, tmp_path, seed=1))
    # Whether blocks run out depends on the random lengths: a draw or two is enough, five are as good as certain.
    assert any(preempted(arch, loaded) for _ in range(5))


def preempted(arch: str, loaded: LoadedModel) -> bool:
    """Checks random requests in a random shape; whether a sequence had to leave and come back."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    requests = random_requests(rng)
    workers, budget = rng.choice([1, 2]), rng.choice([7, 16, 32])
    shape = Shape(max_batch_tokens=budget, workers=workers, num_blocks=40 // workers, overlap=rng.random() < 0.5)
    server = InProcessServer(loaded, shape)
    for _ in range(2):  # the second time, prefixes are cached
        handles = [server.submit(prompt, params) for prompt, params in requests]
        server.run()
        for handle, (prompt, params) in zip(handles, requests, strict=True):
            try:
                check(loaded, prompt, params, server.answers[handle])
            except AssertionError as error:
                raise AssertionError(f"{arch}, seed {seed}, {shape}, {params}") from error
    assert all(worker.pool.used == 0 for worker in server.scheduler.workers.values())
    return server.scheduler.counters["preemptions"] > 0


def test_a_long_prompt_is_reported_in_bounded_parts(tmp_path: Path) -> None:
    """No step computes more rows of logits than it may, whatever the budget; the part before the start is reused."""
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    shape = Shape(num_blocks=400, max_model_len=480, max_batch_tokens=2000, block_size=4)
    server = InProcessServer(loaded, shape)
    backend: Any = server.backends[0]
    logits, rows = backend.logits, []

    def counted(batch: Any) -> torch.Tensor:
        rows.append((batch.num_tokens, len(batch.logit_positions)))
        computed: torch.Tensor = logits(batch)
        return computed

    backend.logits = counted
    prompt = [random.randrange(3, VOCAB) for _ in range(450)]
    params = SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs_from=0, logprobs=LogprobMode.TEMPERED)
    first = server.submit(prompt, params)
    server.run()
    check(loaded, prompt, params, server.answers[first])
    assert [count for _, count in rows] == [256, 194]
    rows.clear()
    later = replace(params, prompt_logprobs_from=402)
    second = server.submit(prompt, later)
    server.run()
    check(loaded, prompt, later, server.answers[second])
    assert rows == [(50, 50 - 1)]


def test_rows_that_do_not_ask_cost_nothing(tmp_path: Path) -> None:
    """Neither further logits nor columns."""
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    server = InProcessServer(loaded, Shape(num_blocks=400))
    plain = server.submit([5, 6, 7, 8], SamplingParams(temperature=0, max_new_tokens=3))
    while server.turn():
        pass
    assert server.answers[plain].reports == {}
    assert not server.scheduler.workers[0].rows.reports.any()
