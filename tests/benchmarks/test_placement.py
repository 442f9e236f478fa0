"""Placement by exact prefix beside other policies, in simulated time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.placement import POLICIES, SCENARIOS, Outcome, Scenario, Simulation

SMALL = {"requests": 160, "system_tokens": 256, "system_prompts": 8, "per_second": 80.0}


def outcome(policy: str, **changed: object) -> Outcome:
    scenario = Scenario("test", **{**SMALL, **changed})  # type: ignore[arg-type]
    return Simulation(scenario, POLICIES[policy]()).run()


def p99(times: list[float]) -> float:
    return float(np.percentile(times, 99))


def test_the_hit_rate_is_near_the_ideal_and_no_request_waits_longer() -> None:
    ours = outcome("by prefix")
    others = outcome("least loaded")
    assert ours.hit_rate >= 0.95 * ours.ideal_hit_rate
    assert others.hit_rate < 0.9 * others.ideal_hit_rate
    assert p99(ours.queued) <= p99(others.queued)
    assert p99(ours.first_token) <= p99(others.first_token)


@pytest.mark.parametrize("seed", range(3))
def test_a_burst_that_takes_all_rows_keeps_to_its_prefixes(seed: int) -> None:
    burst = Simulation(replace(SCENARIOS[2], seed=seed), POLICIES["by prefix"]()).run()
    assert set(burst.placed.values()) == {64}, "all rows are taken"
    assert burst.hit_rate >= 0.95 * burst.ideal_hit_rate


@pytest.mark.parametrize("policy", ["least loaded", "round robin"])
def test_prompts_that_share_nothing_are_served_no_worse(policy: str) -> None:
    unique = {"system_prompts": 0, "system_tokens": 512}
    ours = outcome("by prefix", **unique)
    assert ours.hit_rate == 0
    assert p99(ours.first_token) <= 1.1 * p99(outcome(policy, **unique).first_token)
    assert max(ours.placed.values()) <= 1.2 * min(ours.placed.values())


def test_a_slow_worker_gets_less_and_a_restarted_one_is_not_flooded() -> None:
    slow = outcome("by prefix", pace=(1.0, 1.0, 1.0, 4.0))
    assert slow.placed[3] < min(slow.placed[index] for index in range(3))
    assert slow.hit_rate >= 0.9 * slow.ideal_hit_rate
    restarted = outcome("by prefix", restart_at=0.5)
    assert restarted.hit_rate >= 0.85 * restarted.ideal_hit_rate
    # It computes for three quarters of the time.
    assert 10 < restarted.placed[0] <= 60
