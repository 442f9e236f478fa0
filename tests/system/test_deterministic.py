"""A deterministic request gets the same tokens and log-probabilities, bit for bit, whatever else runs, in bfloat16."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interfaces import SamplingParams, SchedulingOptions, TextContext
from interfaces.request.sampling import LogprobMode
from tests.model_worker.recurrent.tiny_hybrids import HYBRIDS, tiny_hybrid
from tests.model_worker.tiny_models import tiny_model
from tests.system.in_process import InProcessServer, Shape, load

VOCAB = 300
ROOM = Shape(num_blocks=400, max_model_len=260, max_batch_tokens=512)

Asked = list[tuple[list[int], SamplingParams]]
Told = list[tuple[list[int], list[float]]]


def drawn(rng: random.Random, count: int, **values: Any) -> Asked:
    """Long prompts and short ones, some of which begin alike."""
    start = [rng.randrange(3, VOCAB) for _ in range(80)]
    asked = []
    for i in range(count):
        prompt = (start if i % 2 else []) + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 90))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**63),
            logprobs=LogprobMode.TEMPERED,
            max_new_tokens=rng.randint(5, 40),
            **values,
        )
        asked.append((prompt, params))
    return asked


def growing(rng: random.Random, count: int) -> Asked:
    """Requests that begin with few blocks and come to want many: where these are short, some must leave."""
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    return [([rng.randrange(3, VOCAB) for _ in range(5)], params) for _ in range(count)]


def told(loaded: Any, shape: Shape, asked: Asked, crowd: Asked) -> tuple[Told, InProcessServer]:
    """What `asked` got, beside a crowd that wants nothing of the kind."""
    server = InProcessServer(loaded, shape)
    everything = [(each, SchedulingOptions(deterministic=True)) for each in asked] + [
        (each, SchedulingOptions()) for each in crowd
    ]
    order = random.sample(range(len(everything)), len(everything))
    handles = {}
    for i in order:
        (prompt, params), scheduling = everything[i]
        handles[i] = server.submit_context(TextContext.from_prompt(prompt, params), scheduling)
    answers = server.run()
    return [(answers[handles[i]].tokens, answers[handles[i]].logprobs) for i in range(len(asked))], server


# The fused stack takes blocks of 16 tokens and more.
CASES = [("llama", 4), ("llama", 16), ("gpt2", 4), ("qwen3_5_text", 4)]


@pytest.mark.parametrize(("architecture", "block_size"), CASES)
def test_nothing_that_runs_beside_it_matters(tmp_path: Path, architecture: str, block_size: int) -> None:
    make = tiny_hybrid if architecture in HYBRIDS else tiny_model
    path = make(architecture, tmp_path, vocab_size=VOCAB, max_position_embeddings=512)
    loaded = load(path, dtype="bfloat16")
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    asked, crowd = drawn(rng, 6), drawn(rng, 14) + growing(rng, 6)
    room = replace(ROOM, block_size=block_size, num_blocks=1600 // block_size)
    alone: Told = []
    for each in asked:
        found, _ = told(loaded, room, [each], [])
        alone += found
    shapes = [
        room,
        replace(room, prefix_cache=False, overlap=False),
        replace(room, num_blocks=280 // block_size, max_batch_tokens=100),
        replace(room, max_batch_tokens=16, workers=2),
        replace(room, num_blocks=320 // block_size, block_size=2 * block_size, max_batch_tokens=40),
    ]
    preemptions = 0
    for shape in shapes:
        together, server = told(loaded, shape, asked, crowd)
        preemptions += server.scheduler.counters["preemptions"]
        assert server.backends[0].row_invariant == (block_size == 16)
        for (tokens, logprobs), (wanted, expected) in zip(together, alone, strict=True):
            assert tokens == wanted, f"seed {seed}, {shape}"
            assert np.array_equal(logprobs, expected), f"seed {seed}, {shape}"
    assert preemptions > 0
