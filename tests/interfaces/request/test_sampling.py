"""Ranges of the sampling values, and how request, model config and defaults combine."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interfaces.context.text import TextContext
from interfaces.messages import Submit
from interfaces.request.sampling import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
    combine,
)
from interfaces.wire.codec import decode, encode

REFUSED = [
    ("top_k", -2),
    ("top_p", -0.01),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("typical_p", 0.0),
    ("typical_p", 1.01),
    ("typical_p", math.nan),
    ("top_logprobs", -1),
    ("top_logprobs", 65),
    ("top_logprobs", True),
    ("prompt_logprobs_from", -1),
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
    ("max_new_tokens", True),
    ("max_new_tokens", 2.5),
    ("min_new_tokens", -1),
    ("min_new_tokens", False),
    ("thinking_temperature", -0.1),
    ("thinking_temperature", math.nan),
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


def test_a_dialect_may_take_any_finite_temperature() -> None:
    assert combine(SamplingParamsInput(temperature=1e300, any_temperature=True)).temperature == 1e300
    for value in (math.inf, math.nan, -0.1):
        with pytest.raises(ValueError, match="temperature must be finite and at least 0"):
            SamplingParams(temperature=value, any_temperature=True)


def test_top_k_zero_means_all_tokens() -> None:
    assert SamplingParams(top_k=0).top_k == -1


@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_none_is_the_default_where_clients_leave_a_field_open(name: str) -> None:
    left_open: dict[str, Any] = {name: None}
    assert getattr(SamplingParams(**left_open), name) == getattr(SamplingParams(), name)


def test_no_temperature_forces_top_k_to_one_after_the_checks() -> None:
    assert SamplingParams(temperature=0, top_k=40).top_k == 1
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(temperature=0, top_k=-5)


def test_values_are_equal_by_value_and_can_be_changed() -> None:
    params = SamplingParams(seed=1, stop=["x"])
    assert params == SamplingParams(seed=1, stop=["x"])
    params.temperature = 0.5
    assert params != SamplingParams(seed=1, stop=["x"])


def test_the_log_has_every_value(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenyard"):
        SamplingParams(seed=77, thinking_temperature=0.25).log_sampling_info()
    (record,) = caplog.records
    for field in dataclasses.fields(SamplingParams):
        assert f"{field.name}=" in record.message
    assert "seed=77" in record.message
    assert "thinking_temperature=0.25" in record.message


def test_processors_do_not_cross_a_process_boundary() -> None:
    def submit(params: SamplingParams) -> Submit:
        return Submit(1, TextContext.from_prompt([1, 2], params))

    params = SamplingParams(seed=3, logits_processors=[lambda inputs: None])
    with pytest.raises(TypeError, match="logits processors and other callables work only within the process"):
        encode(submit(params))
    plain = submit(dataclasses.replace(params, logits_processors=None))
    assert decode(encode(plain)).context == plain.context


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


def model_that(**values: Any) -> SamplingParamsGenerationConfigDefaults:
    return SamplingParamsGenerationConfigDefaults(**values)


values_of = {
    "temperature": st.floats(0.01, 2),  # 0 also decides top_k
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
    model = model_that(do_sample=False, temperature=0.7)
    assert combine(SamplingParamsInput(top_p=0.9), model).temperature == 0.0
    assert combine(SamplingParamsInput(temperature=0.3), model).temperature == 0.3
    assert combine(SamplingParamsInput(), model_that(do_sample=True)).temperature == 1.0


def test_a_temperature_of_the_request_drops_the_implied_top_k_but_not_the_models_own() -> None:
    assert combine(SamplingParamsInput(temperature=0.9), model_that(do_sample=False)).top_k == -1
    assert combine(SamplingParamsInput(temperature=0.9), model_that(do_sample=False, top_k=20)).top_k == 20
    assert combine(SamplingParamsInput(), model_that(do_sample=False, top_k=20)).top_k == 1
    assert combine(SamplingParamsInput(top_k=5), model_that(do_sample=False)).greedy


def test_an_explicit_seed_of_zero_is_kept() -> None:
    assert combine(SamplingParamsInput(seed=0), model_that(temperature=0.5)).seed == 0


def test_the_operators_values_lie_between_the_model_and_the_request() -> None:
    server = SamplingParamsInput(temperature=0.6, top_k=30, thinking_temperature=0.2, stop_token_ids=[4])
    combined = combine(
        SamplingParamsInput(top_k=7, stop_token_ids=[5]), model_that(do_sample=False, top_p=0.8, eos_token_id=2), server
    )
    assert (combined.temperature, combined.top_k, combined.top_p) == (0.6, 7, 0.8)
    assert combined.thinking_temperature == 0.2
    assert combined.stop_token_ids == [2, 4, 5]


def test_the_documents_name_for_combining() -> None:
    given_, model = SamplingParamsInput(seed=4, top_p=0.5), model_that(temperature=0.3, eos_token_id=9)
    combined = SamplingParams.from_input_and_generation_config(given_, sampling_params_defaults=model)
    assert combined == combine(given_, model)


def test_values_to_update_are_the_models_set_values() -> None:
    model = model_that(temperature=0.0, do_sample=False, eos_token_id=7)
    assert model.values_to_update == {"temperature": 0.0, "do_sample": False, "stop_token_ids": [7]}
    model.values_to_update["stop_token_ids"].append(8)
    assert model.values_to_update["stop_token_ids"] == [7]
    assert SamplingParamsGenerationConfigDefaults().values_to_update == {}


@pytest.mark.parametrize(("eos", "expected"), [(7, [7, 9, 3]), ([7, 9], [7, 9, 3]), (None, [9, 3])])
def test_stop_ids_of_the_request_join_the_models_eos(eos: Any, expected: list[int]) -> None:
    model = model_that(eos_token_id=eos)
    assert combine(SamplingParamsInput(stop_token_ids=[9, 3]), model).stop_token_ids == expected


def test_combining_refuses_what_the_class_refuses() -> None:
    with pytest.raises(ValueError, match="temperature must be between 0 and 2, got 3"):
        combine(SamplingParamsInput(temperature=3.0))
