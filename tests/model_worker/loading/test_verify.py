"""What the check of a model's logits at load finds out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.loading import verify
from model_worker.loading.load import load_model
from tests.model_worker.tiny_models import tiny_model


def test_logits_of_half_precision_are_subtracted_in_float32() -> None:
    """Of 1 and these, bfloat16 has no difference but 1."""
    want, got = (torch.full((1, 64), value).bfloat16() for value in (1.0, 0.0018))
    assert verify.median_error(got, want) == pytest.approx(1 - float(got[0, 0]), rel=1e-5)


def test_a_stack_that_mixes_sequences_up_at_far_positions_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(tiny_model("llama", tmp_path), "float32", "cpu", lambda *_: None)
    stack, longest = loaded.stack, loaded.max_position
    assert stack is not None
    assert longest is not None
    tokens = verify.tokens(loaded.model.config, loaded.device)
    assert not verify.far_stack_differs(loaded, tokens)
    exact, far = stack.logits, []

    def mixed(batch: ForwardBatch, cache: Any) -> Tensor:
        logits = exact(batch, cache)
        far.append(int((batch.positions == longest - 1).sum()))
        return torch.cat(logits.chunk(2)[::-1]) if far[-1] == 2 else logits

    monkeypatch.setattr(stack, "logits", mixed)
    assert verify.far_stack_differs(loaded, tokens)
    assert far[-1] == 2
