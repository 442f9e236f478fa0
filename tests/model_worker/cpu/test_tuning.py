"""Each mechanism of the CPU backend can be switched off, by itself, and changes no result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from model_worker.batch import ForwardBatch
from model_worker.cpu.fused import stack
from model_worker.cpu.fused.attention_plan import plan_for
from model_worker.cpu.fused.stack import FusedStack, fused_stack
from model_worker.cpu.simd.bf12 import HAS_BF12
from model_worker.cpu.tuning import EVERYTHING, Tuning
from model_worker.runner import ModelRunner
from tests.model_worker.cpu.test_fused_stack import batches, load
from tests.model_worker.tiny_models import VOCAB


def same_beginning(rows: int, length: int) -> ForwardBatch:
    """A decode step of rows whose first 64 tokens lie in the same blocks of 16."""
    blocks = -(-length // 16)
    tables = np.arange(rows * blocks).reshape(rows, blocks) % 30
    tables[:, :4] = tables[0, :4]
    tokens = np.arange(3, 3 + rows) % VOCAB
    return ForwardBatch.build(tokens, np.ones(rows, np.int64), np.full(rows, length), tables, 16, np.arange(rows))


def switched_on(made: FusedStack) -> dict[str, bool]:
    """Which mechanisms a stack uses, seen from outside."""
    made.wait_for_copies()
    plan = made._attention(same_beginning(4, 80))
    return {
        "screened_head": made.screens,
        "bf12": made.uses_bf12,
        "cascade_attention": bool((plan.tiles[:, 5] > 0).any()),
        "overlap": made.overlaps,
    }


def test_each_mechanism_can_be_switched_off_and_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORTH_BF12", "WORTH_SCREENING", "WORTH_OVERLAPPING"):
        monkeypatch.setattr(stack, name, 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    loaded = load("llama", "bfloat16", tmp_path_factory.getbasetemp())
    steps = [*batches(np.random.default_rng(), 16, 32), same_beginning(4, 80)]
    wanted: list[torch.Tensor] = []
    greedy: list[list[int]] = []
    for tuning in (EVERYTHING, *(EVERYTHING.without(name) for name in Tuning.names())):
        made = fused_stack(loaded, tuning)
        assert made is not None
        runner = ModelRunner(replace(loaded, stack=made), 32, 16)
        runner.warm_up()
        found = switched_on(made)
        expected = {name: getattr(tuning, name) for name in Tuning.names()}
        assert found == {**expected, "bf12": expected["bf12"] and HAS_BF12}
        logits = [runner.backend.logits(replace(step)) for step in steps]
        tokens = [
            runner.backend.greedy(replace(step), np.zeros(len(step.logit_positions), np.bool_))[0] for step in steps
        ]
        if not wanted:
            wanted = logits
            greedy = [own.tolist() for own in tokens]
        assert all(torch.equal(got, want) for got, want in zip(logits, wanted, strict=True)), tuning
        assert [own.tolist() for own in tokens] == greedy, tuning


def test_rows_without_a_cascade_have_tiles_of_their_own() -> None:
    batch = same_beginning(4, 80)
    assert (plan_for(batch, 1, 2, 1).tiles[:, 4] > 0).any()
    assert not plan_for(batch, 1, 2, 1, cascade=False).tiles[:, 4:].any()
