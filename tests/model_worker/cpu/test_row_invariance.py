"""In the fused stack a token gets the same bits whatever else is in its pass, and however its prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.loading import verify
from model_worker.loading.load import load_model
from model_worker.runner import ModelRunner
from tests.model_worker.tiny_models import VOCAB, tiny_model

BLOCK_SIZE = 16
SEQUENCES = 9
LENGTH = 150


class Passes:
    """Passes over random sequences, each of which has its own blocks in one cache."""

    def __init__(self, loaded: Any, rng: np.random.Generator, sequences: int = SEQUENCES) -> None:
        each = -(-LENGTH // BLOCK_SIZE)
        self._backend = ModelRunner(loaded, sequences * each, BLOCK_SIZE).backend
        assert self._backend.row_invariant
        self.texts = rng.integers(3, VOCAB, (sequences, LENGTH))
        self._tables = rng.permutation(sequences * each).reshape(sequences, each).astype(np.int32)
        self.computed = np.zeros(sequences, np.int64)

    def run(self, members: np.ndarray, chunks: np.ndarray) -> list[Tensor]:
        """Compute the next tokens of some sequences. Returns the logits of each chunk."""
        first = self.computed[members]
        tokens = np.concatenate([self.texts[m, a : a + n] for m, a, n in zip(members, first, chunks, strict=True)])
        self.computed[members] += chunks
        every = np.arange(len(tokens))
        batch = ForwardBatch.build(tokens, chunks, self.computed[members], self._tables[members], BLOCK_SIZE, every)
        return list(self._backend.logits(batch).clone().split(chunks.tolist()))


def in_crowds(passes: Passes, rng: np.random.Generator) -> Tensor:
    """Compute all sequences in random company and pieces: [sequences, LENGTH, vocab]."""
    found: list[list[Tensor]] = [[] for _ in passes.texts]
    while (left := LENGTH - passes.computed).any():
        open_ones = rng.permutation(np.flatnonzero(left))
        members = open_ones[: rng.integers(1, len(open_ones) + 1)]
        longest = rng.choice([2, 5, 17, 100])
        chunks = np.minimum(np.where(rng.random(len(members)) < 0.5, 1, rng.integers(1, longest + 1)), left[members])
        for member, logits in zip(members, passes.run(members, chunks), strict=True):
            found[member].append(logits)
    return torch.stack([torch.cat(parts) for parts in found])


@pytest.mark.parametrize(
    ("arch", "dtype", "options"),
    [
        ("llama", "float32", {}),
        ("qwen3", "bfloat16", {}),
        ("llama", "bfloat16", {"quantization": "int8"}),
        ("llama", "float32", {"kv_dtype": "fp8"}),
        ("qwen3", "bfloat16", {"kv_dtype": "int8"}),
    ],
)
def test_company_and_pieces_change_no_bit(tmp_path: Path, arch: str, dtype: str, options: dict[str, str]) -> None:
    loaded = load_model(tiny_model(arch, tmp_path), dtype, "cpu", lambda *_: None, **options)  # type: ignore[arg-type]
    seed = int(np.random.default_rng().integers(2**31))
    rng = np.random.default_rng(seed)
    crowd = Passes(loaded, rng)
    found = in_crowds(crowd, rng)
    alone = Passes(loaded, rng)
    alone.texts = crowd.texts
    for sequence in range(2):
        wanted = torch.cat([alone.run(np.array([sequence]), np.array([1]))[0] for _ in range(LENGTH)])
        assert torch.equal(found[sequence], wanted), f"seed {seed}, sequence {sequence} token by token"
    for sequence in range(2, SEQUENCES):
        wanted = alone.run(np.array([sequence]), np.array([LENGTH]))[0]
        assert torch.equal(found[sequence], wanted), f"seed {seed}, sequence {sequence} in one piece"


def test_models_with_windows_are_not_invariant(tmp_path: Path) -> None:
    """Sums over a window begin where that of a piece's first token does."""
    loaded = load_model(tiny_model("mistral", tmp_path, hidden_size=64), "float32", "cpu", lambda *_: None)
    assert loaded.stack is not None
    assert not loaded.row_invariant


def test_a_stack_that_adds_in_another_order_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(tiny_model("llama", tmp_path), "float32", "cpu", lambda *_: None)
    assert loaded.row_invariant
    stack = loaded.stack
    assert stack is not None
    tokens = verify.tokens(loaded.model.config, loaded.device)
    assert verify.rows_are_invariant(loaded, tokens)
    exact = stack.logits

    def rounded(batch: ForwardBatch, cache: Any) -> Tensor:
        logits = exact(batch, cache)
        return logits if batch.num_tokens > 1 else logits * (1 + 2**-23)

    monkeypatch.setattr(stack, "logits", rounded)
    assert not verify.rows_are_invariant(loaded, tokens)
