"""Which requests come when: datasets, arrivals, sweeps, and the flags that ask for them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.bench import charts
from deploy.bench.client import Client
from deploy.bench.command import dataset_of, levels_of, limits_of
from deploy.bench.datasets import Dataset, DatasetError, read, words
from deploy.bench.flags import add
from deploy.bench.levels import Plan, arrivals, doubled, run, saturated
from deploy.bench.results import Level
from deploy.bench.workload import Workload
from shared.settings import SettingsError

RANDOM = Workload(1, 32, 8, 0.0, 0, 100, 999)


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    return parser.parse_args(["bench", "http://x", *flags])


def test_random_requests_share_nothing_and_come_again_with_their_seed() -> None:
    requests = Dataset(RANDOM).requests(20, 1)
    assert len({tuple(request.prompt[:8]) for request in requests}) == 20
    assert requests == Dataset(RANDOM).requests(20, 1) != Dataset(RANDOM).requests(20, 2)
    texts = Dataset(RANDOM, texts=True).requests(20, 1)
    assert [len(request.text.split()) for request in texts] == [32] * 20
    assert words(requests[0].prompt) == texts[0].text


def test_shared_beginnings_come_in_turns() -> None:
    dataset = dataset_of(parsed("--dataset", "prefix", "--prefixes", "3", "--prefix-tokens", "16"))
    requests = dataset.requests(9, 0)
    beginnings = [tuple(request.prompt[:16]) for request in requests]
    assert beginnings[:3] == beginnings[3:6] == beginnings[6:]
    assert len(set(beginnings)) == 3
    assert len({tuple(request.prompt[16:]) for request in requests}) == 9
    # A later level has the same beginnings and other ends.
    assert {tuple(request.prompt[:16]) for request in dataset.requests(9, 5)} == set(beginnings)


def test_conversations_and_lines(tmp_path: Path) -> None:
    sharegpt = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "x" * 400}, {"from": "human", "value": "more"}]
    sharegpt.write_text(json.dumps([{"id": "a", "conversations": turns}, {"conversations": []}, {"other": 1}]))
    assert read(sharegpt) == [("ask", 100)]
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a", "output_tokens": 7}\n{"prompt": "b"}\n')
    assert read(lines) == [("a", 7), ("b", 1)]
    dataset = dataset_of(parsed("--dataset", str(lines)))
    requests = dataset.requests(5, 0)
    assert sorted({(request.text, request.output_tokens) for request in requests}) == [("a", 7), ("b", 1)]
    fixed = dataset_of(parsed("--dataset", str(lines), "--output-tokens", "3")).requests(5, 0)
    assert {request.output_tokens for request in fixed} == {3}


@pytest.mark.parametrize("text", ["", "[]", "[{}]", '{"prompt": ""}', "not json"])
def test_a_dataset_without_prompts_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "empty.json"
    file.write_text(text)
    with pytest.raises(DatasetError, match=r"empty\.json"):
        read(file)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 100.0])
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(burstiness: float) -> None:
    times = arrivals(2000, 50.0, burstiness, seed=3)
    gaps = np.diff([0.0, *times])
    assert times[-1] == pytest.approx(40.0)
    assert (gaps >= 0).all()
    # The spread of a gamma distribution, within a wide bound for 2000 draws.
    assert 0.8 < gaps.std() / gaps.mean() * burstiness**0.5 < 1.25


def test_the_loads_of_the_flags() -> None:
    assert levels_of("", "") == [Level(None, 16)]
    assert levels_of("1,2.5", "8") == [Level(1.0, 8), Level(2.5, 8)]
    assert levels_of("", "1,4") == [Level(None, 1), Level(None, 4)]
    assert levels_of("3", "1,4") == [Level(3.0, 1), Level(3.0, 4)]
    assert limits_of(["ttft:500", "itl:50.5"]) == {"ttft": 500.0, "itl": 50.5}


@pytest.mark.parametrize(
    ("rate", "concurrency", "named"),
    [("0", "", "--rate"), ("1,x", "", "--rate"), ("", "1.5", "--concurrency"), ("inf", "", "--rate")],
)
def test_loads_that_cannot_be(rate: str, concurrency: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        levels_of(rate, concurrency)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "first:5", "ttft:-1", "ttft:x"])
def test_limits_that_cannot_be(text: str) -> None:
    with pytest.raises(SettingsError, match="--goodput"):
        limits_of([text])


def test_a_dataset_that_is_no_file() -> None:
    with pytest.raises(DatasetError, match="'nowhere'"):
        dataset_of(parsed("--dataset", "nowhere"))


async def test_a_load_whose_time_is_over_before_its_first_request_says_so() -> None:
    plan = Plan(Dataset(RANDOM), 2, 10.0, time_limit=0.01)
    # The first of the two comes after hours.
    assert arrivals(2, 1e-4, plan.burstiness, plan.seed)[0] > 3600
    client = Client("http://127.0.0.1:1", "m", 1.0)
    with pytest.raises(SettingsError, match=r"--time-limit 0\.01 is over before the first request of 0\.0001 req/s"):
        await run(client, plan, Level(1e-4, None), 0, lambda timeline: None)


def outcome(throughput: float, **more: Any) -> dict[str, Any]:
    return {"request_throughput": throughput, "completed": 10, "num_prompts": 10, "median_e2el_ms": 1000.0} | more


def test_a_sweep_ends_where_more_load_gives_no_more() -> None:
    in_flight = [Level(None, 1 << power) for power in range(3)]
    assert list(doubled(Level(None, 1)))[:3] == in_flight
    assert not saturated(in_flight[:1], [outcome(1.0)])
    assert not saturated(in_flight[:2], [outcome(1.0), outcome(1.9)])
    assert saturated(in_flight, [outcome(1.0), outcome(1.9), outcome(1.95)])
    rates = list(doubled(Level(1.0, 64)))[:2]
    assert rates == [Level(1.0, 64), Level(2.0, 64)]
    # Ten requests at one a second, of which the last takes its usual second: the server keeps up.
    assert not saturated(rates[:1], [outcome(10 / 11)])
    # At two a second they take 5 + 1 seconds; a server that needs 9 does not.
    assert not saturated(rates, [outcome(10 / 11), outcome(10 / 6)])
    assert saturated(rates, [outcome(10 / 11), outcome(10 / 9)])
    assert saturated(rates, [outcome(10 / 11), outcome(0.0, completed=0)])


@pytest.mark.parametrize(
    ("most", "step", "end"), [(0, 1, 1), (1, 0.2, 1), (7, 2, 8), (100, 20, 100), (0.013, 0.005, 0.015)]
)
def test_axes_have_round_numbers(most: float, step: float, end: float) -> None:
    assert charts.step_of(most) == pytest.approx(step)
    assert charts.axis_end(most) == pytest.approx(end)
