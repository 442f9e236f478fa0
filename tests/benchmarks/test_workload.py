"""The planned requests depend on the seed alone, and keep to the lengths and ids asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.workload import Workload, plan


def _workload(**values: Any) -> Workload:
    defaults = {"requests": 20, "prompt_tokens": 30, "output_tokens": 10, "spread": 0.5, "seed": 1}
    return Workload(**({"first_token_id": 100, "last_token_id": 999} | defaults | values))


def test_one_seed_one_plan() -> None:
    assert plan(_workload()) == plan(_workload())
    assert plan(_workload()) != plan(_workload(seed=2))


def test_no_two_prompts_begin_alike() -> None:
    prompts = [request.prompt for seed in (1, 2) for request in plan(_workload(seed=seed, requests=50))]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 100


def test_a_shared_prefix_begins_every_prompt_and_has_a_seed_of_its_own() -> None:
    one = [request.prompt for request in plan(_workload(spread=0.0, shared_prefix=50, prefix_seed=3))]
    other = [request.prompt for request in plan(_workload(spread=0.0, shared_prefix=50, prefix_seed=3, seed=2))]
    assert len({tuple(prompt[:50]) for prompt in one + other}) == 1
    assert len({tuple(prompt[50:58]) for prompt in one + other}) == 40
    assert {len(prompt) for prompt in one} == {80}
    assert plan(_workload(shared_prefix=50, prefix_seed=4))[0].prompt[:50] != one[0][:50]


@given(
    st.integers(1, 200),
    st.integers(1, 200),
    st.floats(0, 0.99),
    st.integers(0, 2**40),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_lengths_and_ids_stay_in_range(
    prompt: int, output: int, spread: float, seed: int, first: int, more: int
) -> None:
    requests = plan(
        _workload(
            prompt_tokens=prompt,
            output_tokens=output,
            spread=spread,
            seed=seed,
            first_token_id=first,
            last_token_id=first + more,
        )
    )
    assert len(requests) == 20
    for request in requests:
        assert max(1, round(prompt * (1 - spread))) <= len(request.prompt) <= round(prompt * (1 + spread))
        assert max(1, round(output * (1 - spread))) <= request.output_tokens <= round(output * (1 + spread))
        assert first <= min(request.prompt) <= max(request.prompt) <= first + more


def test_without_spread_all_are_equally_long() -> None:
    assert {(len(r.prompt), r.output_tokens) for r in plan(_workload(spread=0.0))} == {(30, 10)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("requests", 0),
        ("prompt_tokens", 0),
        ("output_tokens", -1),
        ("spread", 1.0),
        ("seed", -1),
        ("first_token_id", 1000),
        ("shared_prefix", -1),
    ],
)
def test_impossible_workloads_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        _workload(**{name: value})
