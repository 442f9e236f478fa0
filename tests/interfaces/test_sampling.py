"""Ranges of the sampling values, and how request, model config and defaults combine."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interfaces.sampling import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
    combine,
)

REFUSED = [
    ("top_k", -2),
    ("top_p", -0.01),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("frequency_penalty", 2.5),
    ("frequency_penalty", math.nan),
    ("presence_penalty", -2.5),
    ("max_new_tokens", -1),
    ("min_new_tokens", -1),
    ("seed", -1),
    ("seed", 2**64),
    ("logit_bias", {3: math.inf}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_value_out_of_range_is_refused_with_its_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as refusal:
        SamplingParams(**{name: value})
    assert str(refusal.value).startswith(f"{name} must be ")
    assert str(refusal.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 1),
        ("top_p", 0.0),
        ("top_p", 1.0),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("temperature", 0.0),
        ("temperature", 2.0),
        ("frequency_penalty", -2.0),
        ("presence_penalty", 2.0),
        ("max_new_tokens", 0),
        ("seed", 0),
        ("seed", 2**64 - 1),
    ],
)
def test_the_ends_of_the_ranges_are_taken_as_given(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_top_k_zero_means_all_tokens() -> None:
    assert SamplingParams(top_k=0).top_k == -1


def test_greedy_and_penalties_are_derived() -> None:
    assert not SamplingParams().greedy
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams().needs_penalties
    assert SamplingParams(frequency_penalty=0.1).needs_penalties
    assert SamplingParams(presence_penalty=-0.1).needs_penalties
    assert SamplingParams(repetition_penalty=1.1).needs_penalties


def test_every_request_gets_a_seed_of_its_own() -> None:
    assert len({SamplingParams().seed for _ in range(50)}) > 45


values_of = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(1, 100),
    "repetition_penalty": st.floats(0.1, 2),
    "max_new_tokens": st.integers(0, 100),
}


@given(st.fixed_dictionaries({}, optional=values_of), st.fixed_dictionaries({}, optional=values_of))
def test_the_request_wins_over_the_model_and_the_model_over_the_class(
    given_: dict[str, Any], model: dict[str, Any]
) -> None:
    plain = SamplingParams()
    combined = combine(SamplingParamsInput(**given_), SamplingParamsGenerationConfigDefaults(**model))
    for name in values_of:
        assert getattr(combined, name) == given_.get(name, model.get(name, getattr(plain, name)))


def test_do_sample_false_is_greedy_unless_the_request_gives_a_temperature() -> None:
    model = SamplingParamsGenerationConfigDefaults(do_sample=False, temperature=0.7)
    assert combine(SamplingParamsInput(top_p=0.9), model).temperature == 0.0
    assert combine(SamplingParamsInput(temperature=0.3), model).temperature == 0.3
    assert combine(SamplingParamsInput(), SamplingParamsGenerationConfigDefaults(do_sample=True)).temperature == 1.0


@pytest.mark.parametrize(("eos", "expected"), [(7, [7, 9, 3]), ([7, 9], [7, 9, 3]), (None, [9, 3])])
def test_stop_ids_of_the_request_join_the_models_eos(eos: Any, expected: list[int]) -> None:
    model = SamplingParamsGenerationConfigDefaults(eos_token_id=eos)
    assert combine(SamplingParamsInput(stop_token_ids=[9, 3]), model).stop_token_ids == expected


def test_combining_refuses_what_the_class_refuses() -> None:
    with pytest.raises(ValueError, match="temperature must be between 0 and 2, got 3"):
        combine(SamplingParamsInput(temperature=3.0))
