"""Runs one load after the other, and knows when further ones would show nothing new."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploy.bench.client import Client, Finished
from deploy.bench.datasets import Dataset
from deploy.bench.results import Level, Measured
from shared.settings import SettingsError

# A sweep doubles the load so often at most.
MOST_DOUBLINGS = 12
# More requests in flight that give less than this factor of throughput: the server is saturated.
WORTH_MORE = 1.05
# A server that serves less than this share of the requests that come is saturated.
KEPT_UP = 0.9
# The seed of warm-up requests: a prefix cache must not have those of a run.
WARMUP_SEED = 1_000_000


@dataclass(frozen=True)
class Plan:
    """What is sent at each level, and for how long. `requests` None: as many as the level sends in `seconds`.

    `burstiness` is the shape of a gamma distribution of the intervals: 1 is a Poisson process, less comes in bursts,
    and more comes evenly. Seeds follow each other, so that no level meets what another has left in a cache.
    """

    dataset: Dataset
    requests: int | None
    seconds: float
    time_limit: float
    burstiness: float = 1.0
    seed: int = 0

    def count(self, level: Level) -> int:
        """The number of requests of a level."""
        if self.requests is not None:
            return self.requests
        if level.rate is not None:
            return max(1, round(level.rate * self.seconds))
        # In flight at once, a few rounds of them.
        return 4 * (level.concurrency or 16)


async def run(client: Client, plan: Plan, level: Level, number: int, finished: Finished) -> Measured:
    """Run one level, which is the `number`-th. Raises SettingsError when its time ends before its first request."""
    seed = plan.seed + number
    planned = plan.dataset.requests(plan.count(level), seed)
    cpu = time.process_time()
    wall = time.perf_counter()
    if level.rate is None:
        in_flight = level.concurrency or len(planned)
        timelines = await client.run(planned, in_flight, plan.time_limit, finished)
    else:
        times = arrivals(len(planned), level.rate, plan.burstiness, seed)
        timelines = await client.arrivals(planned, times, plan.time_limit, finished, level.concurrency)
    if not timelines:
        raise SettingsError(
            f"--time-limit {plan.time_limit:g} is over before the first request of {level.name} is sent: give more"
        )
    percent = 100 * (time.process_time() - cpu) / max(1e-9, time.perf_counter() - wall)
    return Measured(level, timelines, len(planned), percent)


async def warm_up(client: Client, plan: Plan, requests: int) -> Measured:
    """Send requests that are not measured, a few at a time."""
    planned = plan.dataset.requests(requests, plan.seed + WARMUP_SEED)
    level = Level(None, min(4, requests))
    timelines = await client.run(planned, min(4, requests), plan.time_limit, lambda timeline: None)
    return Measured(level, timelines, requests, 0.0)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Times of arrival in seconds, at this mean rate, the first after one interval."""
    intervals = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    # The last one comes when it should on average, so that a short run has the rate that was asked for.
    times = np.cumsum(intervals)
    return [float(at) for at in times * (count / rate / times[-1])]


def doubled(first: Level) -> Iterator[Level]:
    """The levels of a sweep without end: each twice the one before."""
    for power in range(MOST_DOUBLINGS):
        factor = 1 << power
        rate = None if first.rate is None else first.rate * factor
        in_flight = first.concurrency
        yield Level(rate, in_flight * factor if rate is None and in_flight is not None else in_flight)


def saturated(levels: Sequence[Level], results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last level has shown the server's limit. `results` are the levels' result files.

    With a rate, a server keeps up that answers the last requests as fast as it answered at the first level.
    """
    level = levels[-1]
    last = results[-1]
    if not last["completed"]:
        return True
    if level.rate is None:
        return len(results) > 1 and last["request_throughput"] < WORTH_MORE * results[-2]["request_throughput"]
    count = last["num_prompts"]
    usual = (results[0]["median_e2el_ms"] or 0.0) / 1e3
    return bool(last["request_throughput"] < KEPT_UP * count / (count / level.rate + usual))
