"""Recorded decode steps advance the states of their rows, and of no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_worker.batch import ForwardBatch
from model_worker.recurrent.states import StateKey
from model_worker.runner import ModelRunner
from tests.model_worker.recurrent.recorded import recording
from tests.model_worker.recurrent.tiny_hybrids import tiny_hybrid
from tests.model_worker.test_runner import BLOCK_SIZE, load
from tests.model_worker.tiny_models import VOCAB

ROWS = 6
BLOCKS = 4


def batch(texts: list[np.ndarray], rows: list[int], firsts: list[int]) -> ForwardBatch:
    """A pass over the tokens of these rows from an index on."""
    lengths = np.array([len(texts[row]) - first for row, first in zip(rows, firsts, strict=True)])
    tokens = np.concatenate([texts[row][first:] for row, first in zip(rows, firsts, strict=True)])
    tables = BLOCKS * np.array(rows)[:, None] + np.arange(BLOCKS)
    ends = np.array([len(texts[row]) for row in rows])
    return ForwardBatch.build(
        tokens, lengths, ends, tables, BLOCK_SIZE, lengths.cumsum() - 1, rows=np.array(rows, np.int32)
    )


def states(runner: ModelRunner) -> dict[StateKey, torch.Tensor]:
    assert runner.cache.states is not None
    return {key: tensor[:ROWS].clone() for key, tensor in runner.cache.states.tensors.items()}


@pytest.mark.parametrize("arch", ["lfm2", "qwen3_next", "falcon_h1"])
def test_padding_touches_no_state_of_a_row(
    arch: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of three rows are padded to four, in any order of rows; one of them begins with its only token."""
    rng = np.random.default_rng()
    loaded = load(tiny_hybrid(arch, tmp_path_factory.getbasetemp()))
    plain = ModelRunner(loaded, ROWS * BLOCKS, BLOCK_SIZE, "reference", max_rows=ROWS)
    recorded, replays = recording(loaded, ROWS * BLOCKS, ROWS, monkeypatch)
    texts = [rng.integers(3, VOCAB, length) for length in (9, 1, 5, 3, 7, 2)]
    before = [0, 2, 3, 4, 5]
    for runner in (plain, recorded):
        runner.backend.logits(batch(texts, before, [0] * 5))
    assert not replays
    kept = states(recorded)
    for rows in ([4, 1, 2], [1, 0, 4]):
        for row in rows:
            if row in before:
                texts[row] = np.append(texts[row], rng.integers(3, VOCAB))
        before = [*before, 1]
        step = batch(texts, rows, [len(texts[row]) - 1 for row in rows])
        got = recorded.backend.logits(step).clone()
        torch.testing.assert_close(got, plain.backend.logits(step))
        now = states(recorded)
        for key, tensor in states(plain).items():
            torch.testing.assert_close(now[key][rows], tensor[rows])
            others = [row for row in range(ROWS) if row not in rows]
            assert torch.equal(now[key][others], kept[key][others])
        kept = now
    assert len(replays) == 2
    assert recorded.cache.states is not None
    assert recorded.cache.states.positions[:ROWS].tolist() == [len(text) for text in texts]


def test_a_recorded_step_goes_on_from_its_own_tokens_alone(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny_hybrid("lfm2", tmp_path_factory.getbasetemp()))
    runner, replays = recording(loaded, ROWS * BLOCKS, ROWS, monkeypatch)
    text = np.arange(3, 12)
    runner.backend.logits(batch([text], [0], [0]))
    with pytest.raises(RuntimeError, match="row 0 goes on behind 10 tokens, and its recurrent state stands for 9"):
        runner.backend.logits(batch([np.arange(3, 14)], [0], [10]))
    assert not replays
    runner.backend.logits(batch([np.arange(3, 13)], [0], [9]))
    assert len(replays) == 1
