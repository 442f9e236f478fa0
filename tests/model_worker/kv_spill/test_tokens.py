"""A sequence whose K and V were on the disk meanwhile says what transformers says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from model_worker.kv_spill.start import kv_mover
from model_worker.loading.load import load_model
from model_worker.rows import StepError
from tests.model_worker.execution.tiny_worker import BLOCK_SIZE, BLOCKS_PER_ROW, ROWS, TinyWorker, join
from tests.model_worker.tiny_models import VOCAB, own_tiny_model

SIZE = 1 << 24


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.tensor([prompt])
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [int(token) for token in tokens[0, len(prompt) :]]


@pytest.mark.parametrize("overlap", ["off", "cpu"])
def test_tokens_are_those_of_a_sequence_that_stayed(tmp_path: Path, overlap: str) -> None:
    path = own_tiny_model("llama", tmp_path / "model")
    worker = TinyWorker(load_model(path, "float32", "cpu", lambda *_: None), overlap)
    cache = worker.backend._cache
    blocks = ROWS * BLOCKS_PER_ROW
    moves = worker.shared.moves = kv_mover(cache, blocks, torch.device("cpu"), SIZE, str(tmp_path / "spill"), 0, 0)
    rng = np.random.default_rng()
    prompt = rng.integers(0, VOCAB, 3 * BLOCK_SIZE).tolist()
    worker.prefill(join(0, prompt[:-1]))
    # Its three blocks are saved while a step is in flight, and others write to them from the next step on.
    worker.begin([0])
    other = join(1, rng.integers(0, VOCAB, 4 * BLOCK_SIZE).tolist())
    first = worker.step([1], [len(other.tokens)], [other], drop=[0])
    first.new_blocks[:, 2] -= BLOCKS_PER_ROW
    first = replace(first, save=np.array([(0, 5, 0), (1, 1, 0), (2, 3, 0)], np.int32))
    worker.engine.begin(first).result()
    loading = replace(worker.step([1]), load=np.array([(7, 5, 40), (7, 1, 41)], np.int32))
    worker.engine.begin(loading).result()
    moves.finish()
    [told] = moves.take()
    assert told.blocks.tolist() == [2]
    again = replace(join(5, prompt), start=2 * BLOCK_SIZE)
    answer = worker.engine.begin(worker.step([5], [BLOCK_SIZE], [again])).result().tokens.tolist()
    for _ in range(12):
        answer += worker.engine.begin(worker.step([5])).result().tokens.tolist()
    assert answer == greedy(path, prompt, 13)


def test_a_worker_that_keeps_nothing_refuses_to(tmp_path: Path) -> None:
    worker = TinyWorker(load_model(own_tiny_model("llama", tmp_path), "float32", "cpu", lambda *_: None))
    with pytest.raises(StepError, match="nothing here keeps any"):
        worker.engine.begin(replace(worker.step([]), save=np.zeros((1, 3), np.int32)))
