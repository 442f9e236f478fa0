"""What int8 weights may change about the values of labels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from interfaces import PoolingTask
from model_worker.pooling.heads import VectorLabelHead
from model_worker.pooling.judge import Judge
from model_worker.pooling.modules import Dense, VectorModules
from model_worker.pooling.texts import Texts

WIDTH = 64
TEXTS = Texts(torch.arange(30), (3, 11, 16))


def head_of(bias: float, labels: int = 1) -> VectorLabelHead:
    """Logits are the first numbers of the mean state, and `bias`."""
    dense = Dense(torch.eye(WIDTH)[:labels], torch.full((labels,), float(bias)), nn.Identity())
    modules = VectorModules(("mean",), (), (dense,), labels)
    return VectorLabelHead(modules, multi_label=labels > 1, tasks=frozenset({PoolingTask.CLASSIFY}))


def states_and_judge(bias: float, labels: int = 1) -> tuple[Tensor, Judge]:
    # So large that what changes one number of a state hardly turns it.
    exact = 10 * torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(0))
    exact[:, :labels] = 0
    return exact.clone(), Judge(head_of(bias, labels), TEXTS, exact, 100)


@pytest.mark.parametrize("labels", [1, 3])
def test_a_logit_far_below_zero_may_not_change_much(labels: int) -> None:
    """From -9 to -4 the probability changes by 0.018 alone, and the order of documents may be another."""
    exact, judge = states_and_judge(-9, labels)
    assert judge(exact) is None
    changed = exact.clone()
    changed[:, 0] += 0.4
    assert judge(changed) is None
    changed[:, 0] += 4.6
    assert judge(changed) == "changes its logits too much (by 5.00)"


def test_a_probability_may_not_change_much() -> None:
    exact, judge = states_and_judge(0)
    exact[:, 0] += 0.3
    assert judge(exact) == "changes its probabilities too much (by 0.074)"


def test_large_logits_may_change_by_a_share() -> None:
    exact, judge = states_and_judge(-100)
    exact[:, 0] += 4
    assert judge(exact) is None
    exact[:, 0] += 2
    assert judge(exact) == "changes its logits too much (by 6.00)"


def test_states_that_no_probe_shows_in_labels_may_not_turn() -> None:
    exact, judge = states_and_judge(-9)
    exact[:, WIDTH // 2 :] = 0
    reason = judge(exact)
    assert reason is not None
    assert reason.startswith("changes the states behind its labels too much (cosine 0.")


def test_values_that_are_no_numbers_are_refused() -> None:
    exact, judge = states_and_judge(-9)
    exact[:, 0] = torch.nan
    assert judge(exact) == "changes its probabilities too much (by nan)"
