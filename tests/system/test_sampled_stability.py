"""A sampled request draws the same tokens alone, in a crowd, after preemption, and on any number of workers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from interfaces import SamplingParams
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, Shape, load


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.3, 0.7, 1.0, 1.6]),
        top_k=rng.choice([-1, 5, 40]),
        top_p=rng.choice([1.0, 0.9, 0.6]),
        min_p=rng.choice([0.0, 0.02]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=rng.randrange(2**64),
        max_new_tokens=24,
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_the_crowd_does_not_matter(overlap: bool, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    asked = [([rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))], random_params(rng)) for _ in range(16)]
    alone = []
    for prompt, params in asked:
        server = InProcessServer(loaded, Shape(num_blocks=60, overlap=overlap))
        server.submit(prompt, params)
        alone += [server.run()[0].tokens]
    assert len({tuple(tokens) for tokens in alone}) > 12
    for shape in (Shape(num_blocks=400, overlap=overlap), Shape(overlap=overlap), Shape(overlap=overlap, workers=2)):
        crowd = InProcessServer(loaded, shape)
        for prompt, params in asked:
            crowd.submit(prompt, params)
        assert [answer.tokens for answer in crowd.run()] == alone, f"seed {seed}, {shape}"
        if shape.workers == 1:  # two workers may have blocks enough, by the random lengths
            assert (crowd.scheduler.counters["preemptions"] > 0) == (shape.num_blocks < 400)
