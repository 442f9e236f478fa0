"""The stack hands out the residuals that transformers calls hidden states, of rows, and only where they are watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model_worker.batch import DeferredTokens, ForwardBatch
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import load

LAYERS = (2, 0, 1)
TOKENS = 700
SIZE = 16


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=1024))


def batch_of(tokens: NDArray[np.int64], first: int, count: int, rows: NDArray[np.int32] | None) -> ForwardBatch:
    return ForwardBatch.build(
        tokens=tokens[first : first + count],
        query_lens=np.array([count]),
        kv_lens=np.array([first + count]),
        block_tables=np.arange(-(-TOKENS // SIZE), dtype=np.int32)[None],
        block_size=SIZE,
        logit_positions=np.array([count - 1]),
        rows=rows,
    )


def hidden_states(loaded: LoadedModel, tokens: NDArray[np.int64]) -> torch.Tensor:
    """[T, layers, hidden], as transformers has them."""
    model: Any = loaded.model
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        states = model(torch.from_numpy(tokens)[None], output_hidden_states=True, use_cache=False).hidden_states
    model.set_attn_implementation(ours)
    return torch.stack([states[layer][0] for layer in LAYERS], 1)


def test_residuals_are_transformers_hidden_states(loaded: LoadedModel, tmp_path: Path) -> None:
    """Of few tokens, of one, of so many that cores take blocks of them, and of a pass that is launched."""
    tokens = np.random.default_rng(3).integers(0, VOCAB, TOKENS)
    backend = ModelRunner(loaded, num_blocks=64, block_size=SIZE).backend
    taken: list[tuple[ForwardBatch, NDArray[np.float32]]] = []
    backend.watch(LAYERS, lambda batch, residuals: taken.append((batch, residuals)))
    row = np.array([5], np.int32)
    parts = [(0, 20), (20, 1), (21, 660), (681, 3)]
    for first, count in parts:
        backend.logits(batch_of(tokens, first, count, row))
    backend.logits(batch_of(tokens, 684, 2, None))
    last = batch_of(tokens, 686, 1, row)
    wait = backend.launch(last, DeferredTokens(np.array([-1]), np.array([5]), np.zeros(8, np.int64)))
    assert [batch.num_tokens for batch, _ in taken] == [count for _, count in parts]
    wait()
    assert taken[-1][0] is last
    want = hidden_states(loaded, tokens[:687])
    begins = [*parts, (686, 1)]
    for (first, count), (batch, residuals) in zip(begins, taken, strict=True):
        assert batch.rows is not None
        assert batch.rows.tolist() == [5]
        part = want[first : first + count]
        assert residuals.shape == (count, len(LAYERS), 48)
        error = (torch.from_numpy(residuals) - part).norm() / part.norm()
        assert float(error) < 1e-4


def test_watching_changes_no_logits(loaded: LoadedModel) -> None:
    tokens = np.random.default_rng(4).integers(0, VOCAB, TOKENS)
    plain = ModelRunner(loaded, num_blocks=64, block_size=SIZE).backend
    before = plain.logits(batch_of(tokens, 0, 40, np.array([1], np.int32)))
    taken: list[int] = []
    plain.watch(LAYERS, lambda batch, _: taken.append(batch.num_tokens))
    after = plain.logits(batch_of(tokens, 0, 40, np.array([1], np.int32)))
    assert taken == [40]
    assert torch.equal(before, after)
