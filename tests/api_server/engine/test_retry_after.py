"""Clients that follow Retry-After come again about as often as answers end."""

from __future__ import annotations

import heapq
import random

import pytest

from api_server.engine.retry_after import LONGEST_SECONDS, RetryAfterEstimator


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_any_answer_it_is_a_second_or_two() -> None:
    estimator = RetryAfterEstimator(Clock())
    assert all(estimator.record_refusal() in (1, 2) for _ in range(100))


@pytest.mark.parametrize(("places", "rate"), [(200, 10.0), (50, 20.0), (2000, 100.0)])
def test_refusals_come_as_seldom_as_answers(places: int, rate: float) -> None:
    """`places` more clients than fit; the server ends `rate` answers a second and then takes the first to come."""
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    events: list[tuple[float, int]] = [(clock.now + random.random(), i) for i in range(places)]
    heapq.heapify(events)
    ended = refusals = 0
    while clock.now < 160:
        at, client = heapq.heappop(events)
        while clock.now + 1 / rate < at:
            clock.now += 1 / rate
            estimator.served()
            ended += clock.now > 130
        refusals += at > 130
        heapq.heappush(events, (at + estimator.record_refusal(), client))
    assert 0.3 * ended < refusals < 2 * ended


def test_no_client_waits_for_ever() -> None:
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    estimator.served()
    clock.now += 5
    assert max(estimator.record_refusal() for _ in range(30_000)) == LONGEST_SECONDS
    clock.now += LONGEST_SECONDS + 1
    for _ in range(200):
        estimator.served()
    assert estimator.record_refusal() <= 2
