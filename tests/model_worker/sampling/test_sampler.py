"""The sampler against naive definitions: kept sets, distributions, penalties, log-probabilities, batch independence."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from interfaces.request.sampling import LogprobMode, SamplingParams
from model_worker.sampling import draw, rng
from model_worker.sampling.sampler import Sampled, SamplerRows

CPU = torch.device("cpu")
NO_TOKENS = np.empty(0, np.int32)
Floats = NDArray[np.float32]


def _fresh() -> np.random.Generator:
    return np.random.default_rng()


def _logits(height: int, width: int, spread: float = 3.0) -> Floats:
    return (_fresh().standard_normal((height, width)) * spread).astype(np.float32)


def _scaled(row: Floats, params: SamplingParams) -> Floats:
    temperature = np.float32(max(params.temperature, 1e-6)) if params.temperature else np.float32(1)
    return np.asarray((row - row.max()) / temperature, np.float32)


def _kept(scaled: Floats, params: SamplingParams) -> list[int]:
    """The kept tokens by the words of the definition, one token at a time."""
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if params.temperature == 0:
        return order
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        weights = np.exp(scaled[order].astype(np.float64))
        reached = np.cumsum(weights) / weights.sum() >= params.top_p
        order = order[: int(np.argmax(reached)) + 1] if reached.any() else order
    if params.min_p > 0:
        order = [token for token in order if scaled[token] >= np.float32(np.log(params.min_p))]
    return order


def _exact(row: Floats, params: SamplingParams) -> NDArray[np.float64]:
    scaled = _scaled(row, params)
    probabilities, kept = np.zeros(len(row)), _kept(scaled, params)
    probabilities[kept] = scipy.special.softmax(scaled[kept].astype(np.float64))
    return probabilities


def _token_by_definition(row: Floats, params: SamplingParams, position: int) -> int:
    if params.greedy:
        return int(np.argmax(row))
    scaled, kept = _scaled(row, params), sorted(_kept(_scaled(row, params), params))
    key = rng.row_keys(np.array([params.seed], np.uint64), np.array([position]))
    uniform = rng.uniforms_cpu(np.repeat(key, len(kept)), np.array(kept))
    return kept[int(np.argmax(scaled[kept] - np.log(-np.log(uniform))))]


def _rows(width: int, params: list[SamplingParams], prompt: int = 0, stops: tuple[int, ...] = ()) -> SamplerRows:
    table = SamplerRows(len(params), width, CPU)
    for row, values in enumerate(params):
        table.join(row, values, stops, np.zeros(prompt, np.int32), NO_TOKENS)
    return table


def _sample(table: SamplerRows, logits: Floats, rows: list[int], position: int) -> Sampled:
    count = len(rows)
    return table.sample(torch.from_numpy(logits), np.array(rows, np.int32), np.full(count, position, np.int64))


def _params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"seed": int(_fresh().integers(2**63))} | values))


DISTRIBUTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.4, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.7},
]


@pytest.mark.parametrize("values", DISTRIBUTIONS, ids=str)
def test_20000_samples_have_the_exact_distribution(values: dict[str, Any]) -> None:
    width, rows, positions = 300, 200, 100
    row = _logits(1, width, 1.5)
    table = _rows(width, [_params(**values) for _ in range(rows)])
    batch, order = np.repeat(row, rows, axis=0), list(range(rows))
    counts = np.zeros(width)
    for position in range(positions):
        np.add.at(counts, _sample(table, batch, order, position).tokens, 1)
    expected = _exact(row[0], _params(**values)) * rows * positions
    assert counts[expected == 0].sum() == 0
    _assert_chi_square(counts, expected)


def _assert_chi_square(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> None:
    # Cells below 5 expected draws are pooled, as the test's approximation wants.
    large = expected >= 5
    observed, wanted = counts[large].tolist(), expected[large].tolist()
    if expected[~large].sum() > 0:
        observed.append(counts[~large].sum())
        wanted.append(expected[~large].sum())
    assert scipy.stats.chisquare(observed, np.array(wanted) * (sum(observed) / sum(wanted))).pvalue > 1e-5


ANY_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.1, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([-1, 1, 2, 5, 40, 1000, 10**6]),
    top_p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([LogprobMode.NONE, LogprobMode.TEMPERED, LogprobMode.WARPED]),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(ANY_PARAMS, min_size=1, max_size=8), st.integers(0, 2**31), st.sampled_from([0.25, 0.0]), st.data())
def test_every_token_is_the_one_by_definition(
    params: list[SamplingParams], position: int, grid: float, data: st.DataObject
) -> None:
    """Also on logits rounded to a grid, where most tokens are tied with others at every edge."""
    width = data.draw(st.sampled_from([1, 7, 130, 1500]))
    logits = _logits(len(params), width)
    if grid:
        logits = np.asarray(np.round(logits / grid) * grid, np.float32)
    sampled = _sample(_rows(width, params), logits, list(range(len(params))), position)
    assert sampled.bad is None
    for i, values in enumerate(params):
        assert sampled.tokens[i] == _token_by_definition(logits[i], values, position)
        _assert_logprob(sampled, i, logits[i], values)


def _assert_logprob(sampled: Sampled, i: int, row: Floats, params: SamplingParams) -> None:
    if params.logprobs == LogprobMode.NONE:
        assert sampled.logprobs is None or np.isnan(sampled.logprobs[i])
        return
    assert sampled.logprobs is not None
    token, scaled = int(sampled.tokens[i]), _scaled(row, params).astype(np.float64)
    if params.logprobs == LogprobMode.WARPED:
        expected = float(np.log(_exact(row, params)[token]))
    else:
        expected = float(scipy.special.log_softmax(scaled)[token])
    assert sampled.logprobs[i] == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.lists(ANY_PARAMS, min_size=1, max_size=6), st.sampled_from([0.25, 0.0]), st.sampled_from([9, 1025, 6000]))
def test_torch_form_equals_the_cpu_kernel(params: list[SamplingParams], grid: float, width: int) -> None:
    logits = _logits(len(params), width, float(_fresh().choice([0.5, 3.0])))
    if grid:
        logits = np.asarray(np.round(logits / grid) * grid, np.float32)
    scaled = torch.from_numpy(np.stack([_scaled(row, p) for row, p in zip(logits, params, strict=True)]))
    first, choices = scaled.max(-1).indices, _choices(params, width)
    tokens, logprobs = draw.choose(scaled, first, choices)
    torch_tokens, torch_logprobs = draw.choose_torch(scaled, first, choices)
    assert tokens.tolist() == torch_tokens.tolist()
    np.testing.assert_allclose(logprobs, torch_logprobs, rtol=1e-6, atol=1e-6)


def _choices(params: list[SamplingParams], width: int) -> draw.Choices:
    cut = [p.temperature > 0 for p in params]
    with np.errstate(divide="ignore"):
        log_min_p = [np.log(p.min_p) if c else -np.inf for p, c in zip(params, cut, strict=True)]
    return draw.Choices(
        greedy=np.array([p.greedy for p in params]),
        top_k=np.array([min(p.top_k, width) if c and p.top_k > 0 else width for p, c in zip(params, cut, strict=True)]),
        top_p=np.array([p.top_p if c else 1.0 for p, c in zip(params, cut, strict=True)]),
        log_min_p=np.array(log_min_p, np.float32),
        keys=rng.row_keys(np.array([p.seed for p in params], np.uint64), np.arange(len(params))),
        logprobs=np.array([p.logprobs for p in params], np.int8),
    )


def test_torch_form_in_chunks_equals_the_cpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [_params(top_p=0.95, logprobs=LogprobMode.TEMPERED), _params(top_k=50), _params()] * 5
    scaled = torch.from_numpy(np.stack([_scaled(row, params[0]) for row in _logits(15, 3000)]))
    first, choices = scaled.max(-1).indices, _choices(params, 3000)
    whole = draw.choose(scaled, first, choices)[0]
    monkeypatch.setattr(draw, "CHUNK", 4 * 3000)
    assert draw.choose_torch(scaled, first, choices)[0].tolist() == whole.tolist()


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": LogprobMode.TEMPERED},
    {"watermark": True, "typical_p": 0.8},
    {"top_p": 0.9, "logprobs": LogprobMode.WARPED},
    {"top_k": 40, "frequency_penalty": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.3, "penalize_prompt": True},
    {"min_p": 0.1, "logit_bias": {3: 2.5, 7: -4.0}},
    {"allowed_token_ids": list(range(4, 5000)), "bad_words": [[5], [7, 9], [8, 6, 4]]},
    {"temperature": 0.0, "logprobs": LogprobMode.TEMPERED, "presence_penalty": -1.0},
    {"temperature": 0.7, "top_k": 100, "top_p": 0.8, "min_p": 0.01, "min_new_tokens": 6},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_row_in_a_shuffled_crowd(dtype: torch.dtype) -> None:
    """Bit for bit, log-probabilities too, over steps that build up counts; the crowd is large enough for threads."""
    width, steps, prompt = 9000, 8, _fresh().integers(0, 9000, 5).astype(np.int32)
    params = [_params(**values) for values in MIXED * 2]
    crowd = SamplerRows(40, width, CPU)
    alone = [SamplerRows(1, width, CPU) for _ in params]
    places = _fresh().permutation(40)[: len(params)].astype(np.int32)
    for values, place, single in zip(params, places, alone, strict=True):
        crowd.join(int(place), values, [1, 2], prompt, NO_TOKENS)
        single.join(0, values, [1, 2], prompt, NO_TOKENS)
    for step in range(steps):
        logits = torch.from_numpy(_logits(len(params), width)).to(dtype)
        order = _fresh().permutation(len(params))
        together = crowd.sample(logits[order], places[order], np.full(len(order), 5 + step))
        assert together.logprobs is not None
        for at, i in enumerate(order):
            single = alone[i].sample(logits[i : i + 1], np.zeros(1, np.int32), np.array([5 + step]))
            assert single.tokens[0] == together.tokens[at]
            if single.logprobs is not None:
                assert single.logprobs.tobytes() == together.logprobs[at : at + 1].tobytes()


@pytest.mark.parametrize("values", MIXED, ids=str)
def test_a_replayed_row_goes_on_as_the_original(values: dict[str, Any]) -> None:
    width, prompt, params = 50, np.array([4, 4, 9], np.int32), _params(**values)
    logits = [_logits(1, width, 1.0) for _ in range(12)]

    def run(table: SamplerRows, steps: range) -> list[int]:
        return [int(_sample(table, logits[step], [0], 3 + step).tokens[0]) for step in steps]

    original = SamplerRows(1, width, CPU)
    original.join(0, params, [1, 2], prompt, NO_TOKENS)
    emitted = run(original, range(5))
    rest = run(original, range(5, 12))
    original.drop(0)
    original.join(0, params, [1, 2], prompt, np.array(emitted, np.int32))
    assert run(original, range(5, 12)) == rest


def _penalize(row: Floats, p: SamplingParams, prompt: list[int], emitted: list[int]) -> list[float]:
    """Token by token, from the dialects' descriptions."""
    out: list[float] = row.tolist()
    scope = prompt + emitted if p.penalize_prompt else emitted
    divisor = len(prompt) + len(emitted) if p.penalize_prompt else 1
    for token, count in Counter(scope).items():
        if p.penalize_prompt:
            out[token] *= p.repetition_penalty if out[token] < 0 else 1 / p.repetition_penalty
        out[token] -= p.frequency_penalty * count / divisor + p.presence_penalty
        if not p.penalize_prompt:
            out[token] *= p.repetition_penalty if out[token] < 0 else 1 / p.repetition_penalty
    return out


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.floats(-2, 2),
            st.floats(-2, 2),
            st.floats(0.2, 3),
            st.booleans(),
            st.lists(st.integers(0, 11), min_size=1, max_size=6),
            st.lists(st.integers(0, 11), max_size=6),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_penalties_equal_the_naive_ones(rows: list[tuple[float, float, float, bool, list[int], list[int]]]) -> None:
    """Seen through the log-probability of a greedy row, which is a function of every penalised logit."""
    table, logits = SamplerRows(len(rows), 12, CPU), _logits(len(rows), 12)
    expected, positions = [], []
    for i, (frequency, presence, repetition, whole, prompt, emitted) in enumerate(rows):
        params = SamplingParams(
            temperature=0.0,
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
            penalize_prompt=whole,
            logprobs=LogprobMode.TEMPERED,
        )
        table.join(i, params, [], np.array(prompt, np.int32), np.array(emitted, np.int32))
        expected.append(max(scipy.special.log_softmax(_penalize(logits[i], params, prompt, emitted))))
        positions.append(len(prompt) + len(emitted))
    sampled = table.sample(torch.from_numpy(logits), np.arange(len(rows), dtype=np.int32), np.array(positions))
    assert sampled.logprobs is not None
    np.testing.assert_allclose(sampled.logprobs, expected, rtol=1e-4, atol=1e-5)


def test_sampled_tokens_are_counted_until_another_wins() -> None:
    table = _rows(3, [_params(temperature=0.0, frequency_penalty=1.0)])
    logits = np.array([[2.5, 1.0, 0.0]], np.float32)
    assert [int(_sample(table, logits, [0], step).tokens[0]) for step in range(5)] == [0, 0, 1, 0, 1]


def test_min_new_tokens_holds_back_stop_ids_and_counts_emitted_ones() -> None:
    params = _params(temperature=0.0, min_new_tokens=3)
    logits = np.array([[0.0, 9.0, 1.0, 8.0]], np.float32)
    table = _rows(4, [params], prompt=2, stops=(1, 3, 77, -1))
    assert [int(_sample(table, logits, [0], 2 + step).tokens[0]) for step in range(5)] == [2, 2, 2, 1, 1]
    table.drop(0)
    table.join(0, params, [1, 3], np.zeros(2, np.int32), np.array([2, 2], np.int32))
    assert [int(_sample(table, logits, [0], 4 + step).tokens[0]) for step in range(2)] == [2, 1]


def test_logit_bias_moves_greedy_and_log_probabilities() -> None:
    params = _params(temperature=0.0, logit_bias={2: 3.0, 0: -100.0}, logprobs=LogprobMode.TEMPERED)
    sampled = _sample(_rows(4, [params]), np.array([[5.0, 1.0, 0.0, 0.5]], np.float32), [0], 0)
    expected = scipy.special.log_softmax(np.array([-95.0, 1.0, 3.0, 0.5]))[2]
    assert sampled.tokens.tolist() == [2]
    assert sampled.logprobs is not None
    assert sampled.logprobs[0] == pytest.approx(expected, rel=1e-6)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
    st.sets(st.integers(0, 5)),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 2**32),
)
def test_restrictions_equal_the_naive_ones(
    bad_words: list[list[int]], allowed: set[int], emitted: list[int], seed: int
) -> None:
    """Greedy, so that the token is the best of what a loop over all endings leaves; with nothing left they are off."""
    params = _params(temperature=0.0, bad_words=bad_words, allowed_token_ids=sorted(allowed))
    table = SamplerRows(1, 6, CPU)
    table.join(0, params, [], NO_TOKENS, np.array(emitted, np.int32))
    written = list(emitted)
    generator = np.random.default_rng(seed)
    for step in range(12):
        logits = generator.standard_normal((1, 6)).astype(np.float32)
        possible = [token for token in range(6) if not allowed or token in allowed]
        possible = [t for t in possible if not any([*written, t][-len(word) :] == word for word in bad_words)]
        expected = max(possible or range(6), key=lambda token: logits[0, token])
        sampled = _sample(table, logits, [0], len(emitted) + step)
        assert sampled.tokens.tolist() == [expected]
        written.append(expected)
        if step % 3 == 2:
            table.follow(0, [1, 2])
            written += [1, 2]


@pytest.mark.parametrize("broken", ["nan", "all -inf", "inf"])
@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"top_p": 0.9}, {"presence_penalty": 1.0}], ids=str)
def test_a_bad_row_is_marked_and_the_others_go_on(broken: str, values: dict[str, Any]) -> None:
    params = [_params(**values) for _ in range(4)]
    healthy = _logits(4, 30)
    ill = healthy.copy()
    if broken == "all -inf":
        ill[2] = -np.inf
    else:
        ill[2, 13] = float(broken)
    expected = _sample(_rows(30, params), healthy, [0, 1, 2, 3], 5)
    sampled = _sample(_rows(30, params), ill, [0, 1, 2, 3], 5)
    assert expected.bad is None
    assert sampled.bad is not None
    assert sampled.bad.tolist() == [False, False, True, False]
    assert sampled.tokens[2] == 0
    assert sampled.tokens[[0, 1, 3]].tolist() == expected.tokens[[0, 1, 3]].tolist()


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"temperature": 2.0}], ids=str)
def test_masked_and_padded_tokens_are_never_chosen(values: dict[str, Any]) -> None:
    logits = np.zeros((64, 40), np.float32)
    logits[:, :30] = -np.inf
    logits[:, 25:28] = 0.0
    logits[:, 30:] = 50.0
    table = _rows(30, [_params(**values) for _ in range(64)])
    assert set(_sample(table, logits, list(range(64)), 1).tokens.tolist()) <= {25, 26, 27}


def test_top_p_zero_and_top_k_one_keep_one_token_even_among_equals() -> None:
    logits = np.zeros((100, 20), np.float32)
    logits[:, [4, 9, 11]] = 2.0
    one_token: list[dict[str, Any]] = [{"top_p": 0.0}, {"top_k": 1}] * 50
    params = [_params(**values) for values in one_token]
    assert set(_sample(_rows(20, params), logits, list(range(100)), 1).tokens.tolist()) == {4}


def test_a_row_carries_no_counts_over_to_its_next_owner() -> None:
    params, logits = _params(temperature=0.0, presence_penalty=2.0), np.array([[1.0, 0.5]], np.float32)
    table = _rows(2, [params])
    assert _sample(table, logits, [0], 0).tokens.tolist() == [0]
    table.drop(0)
    table.join(0, params, [], np.array([900, -1], np.int32), NO_TOKENS)
    assert _sample(table, logits, [0], 0).tokens.tolist() == [0]


def test_a_row_whose_join_was_refused_is_greedy_and_disturbs_nobody() -> None:
    """A step that names it may be in flight already."""
    healthy, logits = _params(presence_penalty=0.5), _logits(2, 40)
    table = _rows(40, [healthy, _params()])
    expected = _sample(_rows(40, [healthy]), logits[:1], [0], 3).tokens[0]
    table.drop(1)
    with pytest.raises(ValueError, match="logit_bias names tokens"):
        table.join(1, _params(logit_bias={40: 1.0}, frequency_penalty=1.0), [], NO_TOKENS, NO_TOKENS)
    assert _sample(table, logits, [0, 1], 3).tokens.tolist() == [expected, int(np.argmax(logits[1]))]


def test_mistaken_rows_and_values_are_refused_by_name() -> None:
    table = _rows(10, [_params(), _params()])
    logits = _logits(1, 10)
    for row in (-1, 2):
        with pytest.raises(ValueError, match="outside the table"):
            table.join(row, _params(), [], NO_TOKENS, NO_TOKENS)
        with pytest.raises(ValueError, match="outside the table"):
            table.drop(row)
        with pytest.raises(ValueError, match="outside the table"):
            _sample(table, logits, [row], 0)
    with pytest.raises(ValueError, match="drop it first"):
        table.join(0, _params(), [], NO_TOKENS, NO_TOKENS)
    table.drop(1)
    table.drop(1)
    with pytest.raises(ValueError, match=r"logit_bias names tokens \[10\]"):
        table.join(1, _params(logit_bias={10: 1.0, 3: 1.0}), [], NO_TOKENS, NO_TOKENS)
    with pytest.raises(ValueError, match="fewer than vocab_size 10"):
        _sample(table, _logits(1, 9), [0], 0)
    with pytest.raises(ValueError, match="not equal"):
        _sample(table, logits, [0, 0], 0)
    assert len(_sample(table, logits, [0], 0).tokens) == 1


@settings(max_examples=60, deadline=None)
@given(values=ANY_PARAMS, width=st.integers(2, 90), count=st.integers(1, 64), levels=st.sampled_from([3, 1000]))
def test_reports_are_of_the_distribution_of_the_mode(
    values: SamplingParams, width: int, count: int, levels: int
) -> None:
    """The most probable and the named tokens by a naive definition, ties by id; beside rows that ask for nothing."""
    rng_ = _fresh()
    logits = (rng_.integers(0, levels, (3, width)) / np.float32(levels / 9)).astype(np.float32)
    named = rng_.integers(0, width, 4).tolist()
    mode = values.logprobs or LogprobMode.TEMPERED
    asking = replace(values, logprobs=mode, top_logprobs=count, logprob_ids=named)
    table = _rows(width, [_params(), asking, _params(temperature=0.0)])
    sampled = _sample(table, logits, [2, 1, 0], 7)
    assert sampled.reports is not None
    ((owner, position, report),) = sampled.reports.entries()
    assert (owner, position) == (1, 7)
    scaled = _scaled(logits[1], asking).astype(np.float64)
    kept = _kept(_scaled(logits[1], asking), asking) if mode == LogprobMode.WARPED else list(range(width))
    exact = np.full(width, -np.inf)
    exact[kept] = scaled[kept] - scipy.special.logsumexp(scaled[kept])
    order = sorted(kept, key=lambda token: (-exact[token], token))[:count]
    assert list(report.top_log_probabilities[0]) == order
    np.testing.assert_allclose(list(report.top_log_probabilities[0].values()), exact[order], rtol=1e-5, atol=1e-5)
    asked = report.asked_log_probabilities[0]
    assert sorted(asked) == sorted(set(named))
    np.testing.assert_allclose([asked[token] for token in named], exact[named], rtol=1e-5, atol=1e-5)
    assert sampled.logprobs is not None
    assert report.token_log_probabilities[0] == pytest.approx(sampled.logprobs[1], rel=1e-6, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(values=ANY_PARAMS, typical_p=st.sampled_from([1e-6, 0.2, 0.5, 0.9, 0.999]), grid=st.sampled_from([0.0, 0.5]))
def test_typical_p_by_its_definition(values: SamplingParams, typical_p: float, grid: float) -> None:
    """A naive loop over what the other truncations kept; its neighbour is not touched."""
    values = replace(values, typical_p=typical_p, top_logprobs=64)
    logits = _logits(2, 50)
    if grid:
        logits = np.asarray(np.round(logits / grid) * grid, np.float32)
    sampled = _sample(_rows(50, [values, _params(temperature=0.0)]), logits, [0, 1], 3)
    assert sampled.tokens[1] == int(np.argmax(logits[1]))
    scaled = _scaled(logits[0], values)
    kept = _kept(scaled, values)
    if values.temperature > 0:
        logprobs = scipy.special.log_softmax(scaled[kept].astype(np.float64))
        distance = np.abs(-logprobs - scipy.special.entr(np.exp(logprobs)).sum())
        total, edge = 0.0, -1.0
        for i in np.argsort(distance, kind="stable"):
            total, edge = total + np.exp(logprobs[i]), distance[i]
            if total >= typical_p:
                break
        kept = [token for token, far in zip(kept, distance, strict=True) if far <= edge + 1e-12]
    assert int(sampled.tokens[0]) in kept
    key = rng.row_keys(np.array([values.seed], np.uint64), np.array([3]))
    ids = np.array(sorted(kept))
    noise = -np.log(-np.log(rng.uniforms_cpu(np.repeat(key, len(ids)), ids)))
    wanted = int(np.argmax(logits[0])) if values.temperature == 0 else int(ids[np.argmax(scaled[ids] + noise)])
    assert sampled.tokens[0] == wanted
    assert sampled.reports is not None
    ((_, _, report),) = sampled.reports.entries()
    told = report.top_log_probabilities[0]
    exact = scaled.astype(np.float64)
    if values.logprobs == LogprobMode.WARPED:
        assert set(told) == {token for token in kept if scaled[token] > -np.inf}
        exact -= scipy.special.logsumexp(exact[kept])
    else:
        exact -= scipy.special.logsumexp(exact)
    for token, value in told.items():
        assert value == pytest.approx(exact[token], rel=1e-5, abs=1e-5)
    assert report.token_log_probabilities[0] == pytest.approx(exact[wanted], rel=1e-5, abs=1e-5)
