"""Prefill and decode on workers of their own, in simulated time."""

from __future__ import annotations

from benchmarks.placement import Scenario
from benchmarks.roles import Timed, WithRoles

SCENARIO = Scenario("", 0, 256, 24, 10.0, (1.0, 1.0))


def test_roles_give_every_token_and_cost_the_time_of_the_link() -> None:
    both = Timed(SCENARIO).figures()
    quick = WithRoles(SCENARIO, 1, 1e12).figures()
    slow = WithRoles(SCENARIO, 1, 3e9).figures()
    assert len(both.first) == len(quick.first) == len(slow.first) == 24
    assert len(both.between) == len(quick.between) == len(slow.between)
    assert max(slow.between) > max(quick.between)
