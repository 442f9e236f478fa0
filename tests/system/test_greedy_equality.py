"""Sixteen concurrent requests against transformers' own `generate`, token for token in float32.

Chunked prefill is forced by a small token budget, preemption by few blocks; prompts share prefixes, so that the prefix
cache is read.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from interfaces import Finish, SamplingParams
from model_worker.model import LoadedModel
from tests.model_worker.recurrent.tiny_hybrids import tiny_hybrid
from tests.model_worker.tiny_models import ARCHITECTURES, VOCAB, tiny_model
from tests.system.in_process import InProcessServer, Shape, load

NEW_TOKENS = 18
FEW_BLOCKS = 18
"""For each worker: hardly more than the longest sequence needs."""
EOS = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def reference(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates for each prompt alone, with its own attention and cache."""
    model: Any = loaded.model
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=EOS, pad_token_id=0
        )
        outputs.append(out[0, len(prompt) :].tolist())
    model.set_attn_implementation(ours)
    return outputs


def mixed_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(12)]
    return [
        shared[: rng.choice([0, 0, 8, 12])] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 34))]
        for _ in range(16)
    ]


def long_answers(loaded: LoadedModel) -> tuple[int, list[list[int]], list[list[int]]]:
    """A seed, its prompts and what `generate` answers; where many answers end early, blocks would not run out."""
    for _ in range(100):
        seed = random.randrange(2**31)
        prompts = mixed_prompts(seed)
        wanted = reference(loaded, prompts)
        if sum(map(len, wanted)) > 0.8 * len(prompts) * NEW_TOKENS:
            return seed, prompts, wanted
    raise AssertionError("a hundred random sets of prompts in a row are answered briefly")


# With recurrent layers of each kind.
@pytest.mark.parametrize("arch", [*ARCHITECTURES, "lfm2", "qwen3_5_text", "falcon_h1"])
def test_greedy_tokens_equal_generate(arch: str, models: Path) -> None:
    loaded = load(tiny_model(arch, models) if arch in ARCHITECTURES else tiny_hybrid(arch, models))
    assert any(equal_and_preempted(arch, loaded) for _ in range(5)), "the blocks were meant to run out"


def equal_and_preempted(arch: str, loaded: LoadedModel) -> bool:
    """Checks one random set of prompts; whether blocks ran out, which they do not in each."""
    seed, prompts, wanted = long_answers(loaded)
    assert len({tuple(tokens) for tokens in wanted}) > 8, "the reference must vary, or equality would prove little"
    params, preemptions = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, stop_token_ids=[EOS]), 0
    for overlap in (True, False):
        for workers in (1, 2):
            server = InProcessServer(loaded, Shape(overlap=overlap, workers=workers, num_blocks=FEW_BLOCKS))
            for prompt in prompts:
                server.submit(prompt, params)
            answers = server.run()
            assert [answer.tokens for answer in answers] == wanted, f"{arch}, seed {seed}, {overlap=}, {workers=}"
            preemptions += server.scheduler.counters["preemptions"]
            for answer in answers:
                stopped = answer.tokens[-1] == EOS
                assert answer.finished == (Finish.STOP if stopped else Finish.LENGTH)
    return preemptions > 0
