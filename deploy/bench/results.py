"""The figures of one load, under the names that `vllm bench serve` gives them in its result files.

Times are in milliseconds there. What has no name there, such as the load generator's own share of a core, is beside
them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deploy.bench.metrics import measure
from deploy.bench.timeline import Timeline

PERCENTILES = (50, 90, 95, 99)
# Above this share of a core it is the load generator that is measured.
MOST_CLIENT_CPU_PERCENT = 80.0
# Points of the time line in a result file.
MOST_POINTS = 600


@dataclass(frozen=True)
class Level:
    """One load: requests a second, or so many in flight, or both. `rate` None: all as soon as they may be sent."""

    rate: float | None
    concurrency: int | None

    @property
    def name(self) -> str:
        parts = [] if self.rate is None else [f"{self.rate:g} req/s"]
        parts += [] if self.concurrency is None else [f"{self.concurrency} in flight"]
        return ", ".join(parts) or "all at once"


@dataclass(frozen=True)
class Measured:
    """What one load gave."""

    level: Level
    timelines: Sequence[Timeline]
    planned: int
    client_cpu_percent: float


def result(measured: Measured, about: Mapping[str, Any], goodput: Mapping[str, float]) -> dict[str, Any]:
    """The result file's object. `goodput` are limits in milliseconds by their names in LIMITS."""
    timelines = list(measured.timelines)
    figures = measure(timelines, measured.planned)
    good = [timeline for timeline in timelines if timeline.completed]
    seconds, running, tokens = time_line(timelines)
    failed = sum(figures.failures.values())
    found: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S", time.gmtime()),
        **about,
        "num_prompts": measured.planned,
        "request_rate": "inf" if measured.level.rate is None else measured.level.rate,
        "max_concurrency": measured.level.concurrency,
        "duration": figures.wall_s,
        "completed": figures.completed,
        "failed": failed,
        "failures": figures.failures,
        "first_refusal": next((timeline.detail for timeline in timelines if timeline.detail), None),
        "total_input_tokens": figures.prompt_tokens,
        "total_output_tokens": figures.output_tokens,
        "request_throughput": figures.req_per_s,
        "request_goodput": None,
        "goodput_share": None,
        "output_throughput": figures.output_tok_per_s,
        "total_token_throughput": figures.total_tok_per_s,
        "max_output_tokens_per_s": max(tokens, default=0.0),
        "max_concurrent_requests": most_at_once(timelines),
        "client_cpu_percent": measured.client_cpu_percent,
        "credible": failed == 0 and measured.client_cpu_percent <= MOST_CLIENT_CPU_PERCENT,
        **_latencies(good),
        "timeline": {"seconds": seconds, "running": running, "output_tokens_per_s": tokens},
    }
    if goodput:
        within = sum(_within(timeline, goodput) for timeline in good)
        found["request_goodput"] = within / figures.wall_s
        found["goodput_share"] = within / measured.planned
        found["goodput_limits_ms"] = dict(goodput)
    return found


def latencies_of(timeline: Timeline) -> dict[str, float | None]:
    """The seconds of one request by their names in LIMITS; `itl` is the mean of its gaps."""
    gaps = timeline.gaps
    return {
        "ttft": timeline.first_token,
        "tpot": timeline.per_output_token,
        "itl": sum(gaps) / len(gaps) if gaps else None,
        "e2el": timeline.latency,
    }


def _latencies(good: Sequence[Timeline]) -> dict[str, float | None]:
    values: dict[str, list[float | None]] = {
        "ttft": [timeline.first_token for timeline in good],
        "tpot": [timeline.per_output_token for timeline in good],
        "itl": [gap for timeline in good for gap in timeline.gaps],
        "e2el": [timeline.latency for timeline in good],
    }
    found: dict[str, float | None] = {}
    for name, seconds in values.items():
        known = np.array([value for value in seconds if value is not None]) * 1e3
        some = len(known) > 0
        found[f"mean_{name}_ms"] = float(known.mean()) if some else None
        found[f"median_{name}_ms"] = float(np.median(known)) if some else None
        found[f"std_{name}_ms"] = float(known.std()) if some else None
        for percentile in PERCENTILES:
            found[f"p{percentile}_{name}_ms"] = float(np.percentile(known, percentile)) if some else None
    return found


def _within(timeline: Timeline, limits: Mapping[str, float]) -> bool:
    """Whether a request kept all limits. A time that it does not have, as a single token has no gaps, keeps any."""
    found = latencies_of(timeline)
    return all((found[name] or 0.0) * 1e3 <= limit for name, limit in limits.items())


def most_at_once(timelines: Sequence[Timeline]) -> int:
    """The largest number of requests that were in flight at one time."""
    changes = sorted([(t.sent, 1) for t in timelines] + [(t.ended, -1) for t in timelines])
    now = 0
    most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def time_line(timelines: Sequence[Timeline]) -> tuple[list[float], list[int], list[float]]:
    """Seconds since the start, the requests that were in flight then, and the output tokens of a second around then.

    A chunk counts as many tokens as its answer has for each of its chunks.
    """
    start = min(timeline.sent for timeline in timelines)
    end = max(timeline.ended for timeline in timelines)
    width = max(1.0, (end - start) / MOST_POINTS)
    count = max(1, int(np.ceil((end - start) / width)))
    edges = start + width * np.arange(count)
    sent = np.sort([timeline.sent for timeline in timelines])
    ended = np.sort([timeline.ended for timeline in timelines])
    running = np.searchsorted(sent, edges, side="right") - np.searchsorted(ended, edges, side="right")
    tokens = np.zeros(count)
    for timeline in timelines:
        if timeline.chunks:
            weight = max(timeline.output_tokens, len(timeline.chunks)) / len(timeline.chunks)
            places = np.minimum(((np.array(timeline.chunks) - start) / width).astype(int), count - 1)
            np.add.at(tokens, places, weight / width)
    return [round(float(edge - start), 3) for edge in edges], running.tolist(), [round(float(t), 2) for t in tokens]
