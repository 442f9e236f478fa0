"""One measured run: the load, and what it cost the client and the server's processes meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.processes import CpuTimes, per_thousand_tokens
from deploy.bench.client import Client, Finished
from deploy.bench.metrics import Metrics, measure
from deploy.bench.timeline import Timeline
from deploy.bench.workload import Workload, plan

INTRUDER_SEED_OFFSET = 500_000
"""Intruders must not share a prefix with the streams they disturb."""


@dataclass(frozen=True)
class Intruder:
    """A long prompt that arrives beside the closed loop every so many seconds, and asks for one token."""

    prompt_tokens: int
    every_s: float


@dataclass(frozen=True)
class Load:
    """How a run is driven. `time_limit` bounds a run, `request_timeout` one request; both in seconds."""

    concurrency: int
    time_limit: float
    request_timeout: float
    intruder: Intruder | None = None


@dataclass(frozen=True)
class Run:
    """What one run gave; `cpu_s` is empty for a server whose processes are out of sight.

    `intruders` are in no figure but the CPU time.
    """

    workload: Workload
    metrics: Metrics
    cpu_s: dict[str, float]
    cpu_s_per_1000_output_tokens: dict[str, float]
    client_cpu_percent: float
    timelines: list[Timeline] = field(repr=False)
    intruders: list[Timeline] = field(repr=False, default_factory=list)


async def measured_run(
    client: Client, workload: Workload, load: Load, supervisor: int | None, finished: Finished
) -> Run:
    planned = plan(workload)
    before, cpu, wall = _server_times(supervisor), time.process_time(), time.perf_counter()
    timelines, intruders = await asyncio.gather(
        client.run(planned, load.concurrency, load.time_limit, finished), _intrude(client, workload, load)
    )
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    used = _server_times(supervisor).since(before)
    metrics = measure(timelines, len(planned))
    per_thousand = per_thousand_tokens(used, metrics.output_tokens)
    return Run(workload, metrics, used, per_thousand, 100 * cpu / wall, timelines, intruders)


async def _intrude(client: Client, workload: Workload, load: Load) -> list[Timeline]:
    if load.intruder is None:
        return []
    every = load.intruder.every_s
    prompts = replace(
        workload,
        requests=max(1, math.ceil(load.time_limit / every) - 1),
        prompt_tokens=load.intruder.prompt_tokens,
        output_tokens=1,
        seed=workload.seed + INTRUDER_SEED_OFFSET,
    )
    times = [every * i for i in range(1, prompts.requests + 1)]
    return await client.arrivals(plan(prompts), times, load.time_limit)


def failed(runs: Sequence[Run]) -> int:
    return sum(sum(run.metrics.failures.values()) for run in runs)


def _server_times(supervisor: int | None) -> CpuTimes:
    return CpuTimes({}) if supervisor is None else CpuTimes.of(supervisor)
