"""The packed, paged forward pass gives the tokens of transformers' own generate, whatever the batch looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from model_worker.batch import ForwardBatch
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from tests.model_worker.tiny_models import ARCHITECTURES, VOCAB, tiny_model

BACKENDS = ("reference", "cpu")
BLOCK_SIZE = 4
NEW_TOKENS = 10


class Driver:
    """A scheduler in miniature: random chunks of many sequences per step, blocks from a shuffled free list."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], rng: np.random.Generator) -> None:
        self.runner, self.rng = runner, rng
        self.texts = [list(prompt) for prompt in prompts]
        self.goals = [len(prompt) + NEW_TOKENS for prompt in prompts]
        self.computed = [0] * len(prompts)
        self.blocks: list[list[int]] = [[] for _ in prompts]
        self.free = [int(block) for block in rng.permutation(runner.num_blocks)]

    def run(self) -> list[list[int]]:
        """Greedy tokens of every prompt."""
        while members := [s for s in range(len(self.texts)) if len(self.texts[s]) < self.goals[s]]:
            self.step([s for s in members if self.rng.random() < 0.7] or members[:1])
        return [text[-NEW_TOKENS:] for text in self.texts]

    def step(self, members: list[int]) -> None:
        """One forward: decode rows take their one token, the others a random piece of what is left of the prompt."""
        lens = [int(self.rng.integers(1, len(self.texts[s]) - self.computed[s] + 1)) for s in members]
        chunks = [self.texts[s][self.computed[s] :][:n] for s, n in zip(members, lens, strict=True)]
        for s, n in zip(members, lens, strict=True):
            self.computed[s] += n
            while len(self.blocks[s]) * BLOCK_SIZE < self.computed[s]:
                self.blocks[s].append(self.free.pop())
        ready = [s for s in members if self.computed[s] == len(self.texts[s])]
        last = np.cumsum(lens)[[members.index(s) for s in ready]] - 1
        for s, logits in zip(ready, self.runner.backend.logits(self.batch(members, chunks, last)), strict=True):
            self.texts[s].append(int(logits.argmax()))

    def batch(self, members: list[int], chunks: list[list[int]], logit_positions: np.ndarray) -> ForwardBatch:
        # Unused entries of a block table hold a block number that does not exist: nothing may read them.
        tables = np.full((len(members), max(len(self.blocks[s]) for s in members) + 2), 1 << 30, np.int32)
        for row, s in enumerate(members):
            tables[row, : len(self.blocks[s])] = self.blocks[s]
        return ForwardBatch.build(
            np.concatenate([np.array(chunk) for chunk in chunks]),
            np.array([len(chunk) for chunk in chunks]),
            np.array([self.computed[s] for s in members]),
            tables,
            BLOCK_SIZE,
            logit_positions.astype(np.int64),
            rows=np.array(members),
        )


def load(path: Path) -> LoadedModel:
    return load_model(path, "float32", "cpu", lambda phase, done, total: None)


def random_prompts(rng: np.random.Generator, count: int) -> list[list[int]]:
    return [[int(token) for token in rng.integers(3, VOCAB, rng.integers(1, 40))] for _ in range(count)]


def generate(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers itself says, one prompt at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    texts = (model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=NEW_TOKENS) for p in prompts)
    return [text[0, -NEW_TOKENS:].tolist() for text in texts]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_equal_generate(arch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = np.random.default_rng()
    path = tiny_model(arch, tmp_path_factory.getbasetemp())
    prompts = random_prompts(rng, 16)
    expected = generate(path, prompts)
    assert len({token for text in expected for token in text}) > 15, "the random model repeats itself"
    loaded = load(path)
    for backend in BACKENDS:
        runner = ModelRunner(loaded, num_blocks=16 * 13, block_size=BLOCK_SIZE, attention=backend)
        assert Driver(runner, prompts, rng).run() == expected, f"with backend {backend}"


def test_a_batch_of_another_block_size_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    runner = ModelRunner(load(tiny_model("llama", tmp_path_factory.getbasetemp())), num_blocks=2, block_size=8)
    one = np.ones(1, np.int64)
    with pytest.raises(ValueError, match="blocks of 4 tokens, the cache of 8"):
        runner.backend.logits(ForwardBatch.build(one, one, one, np.zeros((1, 1), np.int32), 4, one - 1))


def test_warm_up_leaves_results_as_they_are(tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = np.random.default_rng()
    path = tiny_model("qwen3", tmp_path_factory.getbasetemp())
    prompts = random_prompts(rng, 3)
    runner = ModelRunner(load(path), num_blocks=39, block_size=BLOCK_SIZE)
    runner.warm_up()
    assert runner.token_capacity == 39 * BLOCK_SIZE
    assert Driver(runner, prompts, rng).run() == generate(path, prompts)
