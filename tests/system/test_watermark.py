"""The watermark is found in marked texts and in no others, with few blocks, neighbours and preemption."""

from __future__ import annotations

import random
from pathlib import Path

from interfaces import SamplingParams
from model_worker.sampling.watermark import GAMMA, green_list
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, Shape, load

NEW_TOKENS = 150


def z_score(prompt: list[int], tokens: list[int]) -> float:
    """How many standard deviations more tokens are green than chance would make."""
    before = [prompt[-1], *tokens[:-1]]
    green = sum(token in green_list(last, VOCAB).tolist() for last, token in zip(before, tokens, strict=True))
    return float((green - GAMMA * len(tokens)) / (len(tokens) * GAMMA * (1 - GAMMA)) ** 0.5)


def test_only_marked_texts_are_recognised(tmp_path: Path) -> None:
    loaded = load(tiny_model("llama", tmp_path, seed=1))
    server = InProcessServer(loaded, Shape(num_blocks=120, max_model_len=200))
    asked = []
    # Whether a text is recognised is a matter of chance, if of very little.
    rng = random.Random(3)
    for i in range(6):
        prompt = [rng.randrange(3, VOCAB) for _ in range(8)]
        params = SamplingParams(temperature=1.5, max_new_tokens=NEW_TOKENS, watermark=i % 2 == 0, seed=i)
        asked.append((server.submit(prompt, params), prompt, params))
    server.run()
    assert server.scheduler.counters["preemptions"] > 0
    for handle, prompt, params in asked:
        z = z_score(prompt, server.answers[handle].tokens)
        assert z > 4 if params.watermark else abs(z) < 4.5, f"{z}, {params}"
