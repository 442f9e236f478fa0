"""What this server counts about its requests, in one set of figures for all dialects and all API replicas.

Each replica keeps its counters in a file of the run directory (prometheus_client's multiprocess mode), so that
whichever replica is scraped answers for all of them, dead ones included. The facts of the scheduler come from its last
`Status` at scrape time. Knows the figures and when they are taken; the names that other servers' dashboards use for
them are in `metrics_aliases.py`.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from api_server.metrics_aliases import aliases
from interfaces.messages import Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = tuple(round(base * 10.0**power, 6) for power in range(-3, 3) for base in (1, 2, 3.5, 6))
"""Bounds of durations of a whole request: 1 ms to 600 s, four a decade."""

TOKEN_SECONDS = tuple(round(base * 10.0**power, 7) for power in range(-4, 1) for base in (1, 2, 3.5, 6))
"""Bounds of the time of one token: 0.1 ms to 6 s."""

LENGTHS = tuple(float(1 << power) for power in range(21))


class Outcome:
    """How a request ended; values of the label `outcome`."""

    OK = "ok"
    INVALID = "invalid"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    CANCELLED = "cancelled"


class _BatchedHistogram(Histogram):
    """A histogram that takes a request's observations in one go: one write per bucket hit instead of two a token."""

    def add(self, counts: Iterable[tuple[int, int]], total: float) -> None:
        """`counts` are pairs (bucket index, observations), `total` the sum of what was observed."""
        self._sum.inc(total)
        for bucket, count in counts:
            self._buckets[bucket].inc(count)


class Metrics:
    """The counters of this replica, and the exposition for all replicas.

    `directory` is where replicas keep their counters; PROMETHEUS_MULTIPROC_DIR must name it before prometheus_client is
    imported. None counts in this process only.
    """

    def __init__(self, model_name: str, directory: Path | None = None) -> None:
        self._model_name = model_name
        self._directory = directory
        self._own = own = CollectorRegistry()
        self.requests = Counter("tokenyard_requests", "Requests that have ended", ["route", "outcome"], registry=own)
        self.prompt_tokens = Counter("tokenyard_prompt_tokens", "Prompt tokens of ended requests", registry=own)
        self.generation_tokens = Counter("tokenyard_generation_tokens", "Tokens generated", registry=own)
        self.cached_tokens = Counter(
            "tokenyard_cached_prompt_tokens", "Prompt tokens that came from the prefix cache", registry=own
        )
        self.validation = self._histogram("request_validation_seconds", "Arrival to submission", SECONDS)
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to the first token (TTFT)", SECONDS)
        self.itl = self._histogram("inter_token_latency_seconds", "Between tokens of one request (ITL)", TOKEN_SECONDS)
        self.tpot = self._histogram(
            "time_per_output_token_seconds", "First to last token, per token after the first (TPOT)", TOKEN_SECONDS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the end, of served requests", SECONDS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt length of a request", LENGTHS)
        self.generation_length = self._histogram("request_generation_tokens", "Answer length of a request", LENGTHS)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> _BatchedHistogram:
        return _BatchedHistogram("tokenyard_" + name, documentation, buckets=buckets, registry=self._own)

    def request(self, route: str) -> RequestMeter:
        """Starts the clock of one request."""
        return RequestMeter(self, route)

    def exposition(self, status: Status | None) -> bytes:
        """The text that GET /metrics answers."""
        return generate_latest(_Everything(self._families(), _scheduler_facts(status), self._model_name))

    def _families(self) -> Iterable[Metric]:
        if self._directory is None:
            return list(self._own.collect())
        collector: Any = MultiProcessCollector  # the library leaves it untyped
        return cast(list[Metric], collector(None, str(self._directory)).collect())


class RequestMeter:
    """Times of one request, written into the shared counters once, at its end.

    Call `submitted` when the prompt is tokenized, `tokens` for each arrival of tokens, `finish` exactly once; later
    calls of `finish` do nothing, so that clean-up code may call it too.
    """

    __slots__ = (
        "_cached",
        "_finished",
        "_first",
        "_gaps",
        "_generated",
        "_last",
        "_metrics",
        "_prompt",
        "_route",
        "started",
        "submitted_at",
    )

    def __init__(self, metrics: Metrics, route: str) -> None:
        self._metrics = metrics
        self._route = route
        self._gaps = [0] * (len(TOKEN_SECONDS) + 1)
        self._prompt = self._cached = self._generated = 0
        self._first = self._last = self.submitted_at = 0.0
        self._finished = False
        self.started = time.perf_counter()

    def submitted(self, prompt_tokens: int) -> None:
        """The request was understood; several calls (a batch, say) add up."""
        self.submitted_at = self.submitted_at or time.perf_counter()
        self._prompt += prompt_tokens

    def cached(self, tokens: int) -> None:
        self._cached += tokens

    def tokens(self, count: int) -> None:
        """`count` tokens arrived together: they share the time since the tokens before them."""
        now = time.perf_counter()
        if self._generated:
            self._gaps[bisect_left(TOKEN_SECONDS, (now - self._last) / count)] += count
        else:
            self._first = now
        self._last = now
        self._generated += count

    def finish(self, outcome: str) -> None:
        if self._finished:
            return
        self._finished = True
        metrics = self._metrics
        metrics.requests.labels(self._route, outcome).inc()
        if self.submitted_at:
            self._write_served(metrics, outcome)

    def _write_served(self, metrics: Metrics, outcome: str) -> None:
        metrics.prompt_tokens.inc(self._prompt)
        metrics.prompt_length.observe(self._prompt)
        metrics.validation.observe(self.submitted_at - self.started)
        if self._cached:
            metrics.cached_tokens.inc(self._cached)
        if outcome == Outcome.OK:
            metrics.e2e.observe(time.perf_counter() - self.started)
        if self._generated:
            metrics.generation_tokens.inc(self._generated)
            metrics.generation_length.observe(self._generated)
            metrics.ttft.observe(self._first - self.started)
        if self._generated > 1:
            metrics.itl.add(((i, n) for i, n in enumerate(self._gaps) if n), self._last - self._first)
            metrics.tpot.observe((self._last - self._first) / (self._generated - 1))


@dataclass(frozen=True)
class _Everything:
    """A collector of one scrape: our families, then the same figures under other servers' names."""

    requests: Iterable[Metric]
    scheduler: Iterable[Metric]
    model_name: str

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in (*self.requests, *self.scheduler)}
        yield from families.values()
        yield from aliases(families, self.model_name)


def _scheduler_facts(status: Status | None) -> list[Metric]:
    """Gauges and counters of the last `Status`; without one only that the scheduler is not ready."""
    ready = GaugeMetricFamily("tokenyard_scheduler_ready", "1 while the scheduler accepts work")
    ready.add_metric([], float(status is not None and status.ready))
    if status is None:
        return [ready]
    running = GaugeMetricFamily("tokenyard_requests_running", "Sequences in the batches", value=status.running)
    waiting = GaugeMetricFamily("tokenyard_requests_waiting", "Sequences that wait for room", value=status.waiting)
    block = GaugeMetricFamily("tokenyard_kv_block_size", "Tokens in one KV block", value=status.block_size)
    return [ready, running, waiting, block, *_worker_facts(status), *_scheduler_counters(status)]


def _worker_facts(status: Status) -> Iterator[Metric]:
    labels = ["device", "index"]
    running = GaugeMetricFamily("tokenyard_worker_running", "Sequences on one worker", labels=labels)
    blocks = GaugeMetricFamily("tokenyard_kv_blocks", "KV blocks by state", labels=[*labels, "state"])
    idle = GaugeMetricFamily("tokenyard_worker_seconds_since_step", "Age of the last completed step", labels=labels)
    steps = CounterMetricFamily("tokenyard_worker_steps", "Forward passes", labels=labels)
    starts = CounterMetricFamily("tokenyard_worker_starts", "Times the worker's slot was started", labels=labels)
    for worker in status.workers:
        names = [worker.device, str(worker.index)]
        running.add_metric(names, worker.running)
        blocks.add_metric([*names, "total"], worker.blocks_total)
        blocks.add_metric([*names, "used"], worker.blocks_used)
        blocks.add_metric([*names, "cached"], worker.blocks_cached)
        idle.add_metric(names, worker.seconds_since_step)
        steps.add_metric(names, worker.steps)
        starts.add_metric(names, worker.epoch)
    yield from (running, blocks, idle, steps, starts)


def _scheduler_counters(status: Status) -> Iterator[Metric]:
    for name, value in sorted(status.counters.items()):
        plain = re.sub(r"[^a-z0-9_]", "_", name.lower()).removesuffix("_total")
        yield CounterMetricFamily(f"tokenyard_scheduler_{plain}", f"Counter {name!r} of the scheduler", value=value)
