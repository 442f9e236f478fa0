"""One cell of a comparison: one piece of standard work on one server, warmed up, measured, and turned into figures.

Knows loads and time lines. It does not know how servers are started, nor what they are compared with.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.processes import WORKER
from benchmarks.run import Run, measured_run
from benchmarks.standard_work import StandardWork
from deploy.bench.client import Client
from deploy.bench.metrics import NOT_SENT, Distribution, steady_gaps
from deploy.bench.timeline import CUT_OFF, Timeline

WARMUP_S = 60.0
WARMUP_SEED_OFFSET = 1_000_000
LATER_PROMPTS = 3

RATE = "streamed tok/s"
PER_CPU = "tokens per CPU s"
TEXTS = "texts/s"
TEXTS_PER_CPU = "texts per CPU s"
OVERHEAD = "CPU ms per text beside the model"
REUSE = "TTFT of later prompts over first"
DISTURBED = "p99 ITL with intruder, ms"
FIGURES: Mapping[str, str] = {
    RATE: "see its definition; equal to output tok/s where nothing was cut off",
    TEXTS: "texts with their vectors over wall time, one text a request",
    TEXTS_PER_CPU: "texts over user + system seconds of all processes of the server",
    OVERHEAD: "user + system time per text of our processes but the model's workers",
    "latency p50, ms": "of texts with their vectors, at the client",
    "latency p99, ms": "the same",
    "total tok/s": "prompt and output tokens of completed requests over wall time",
    PER_CPU: "streamed tokens over user + system seconds of all processes of the server",
    "TTFT p50, ms": "of completed requests",
    "TPOT p50, ms": "of completed requests",
    "ITL p99, ms": "of completed requests",
    REUSE: "alone on the server: median TTFT of three prompts that share the first one's prefix, over the first one's",
    DISTURBED: "gaps of the decoding streams, from when all of them have started, cut off or not",
    "p99 ITL, with over without": "p99 with the intruder over p99 of the same streams without it, in the same round",
    "p99 ITL with over p50 without": "the same over the median gap without the intruder",
}
"""What a cell can give, with its definition; which of them it gives depends on the work."""


@dataclass(frozen=True)
class Cell:
    """What one server did with one piece of work in one round."""

    work: str
    contender: str
    round: int
    figures: dict[str, float]
    cut_off: int
    failures: dict[str, int]
    run: Run
    undisturbed: Run | None = None
    idle_cpu_share: float = 0.0
    """CPU seconds of the servers that waited, over the wall time of the cell: what the measurement was disturbed by."""


async def measured_cell(
    work: StandardWork, client: Client, name: str, pid: int | None, round_: int, time_limit: float
) -> Cell:
    """Rounds have different prompts; within a round all servers get the same."""
    workload, load = work.workload(round_, prefix_seed=round_), work.load(time_limit)
    await _warm_up(work, client, round_)
    figures: dict[str, float] = {}
    if work.shared_prefix:
        figures |= await _prefix_reuse(work, client, round_)
    undisturbed = None
    if work.intruder:
        undisturbed = await measured_run(client, workload, load, pid, _ignore)
        workload = dataclasses.replace(workload, seed=workload.seed + 2 * WARMUP_SEED_OFFSET)
        load = dataclasses.replace(load, intruder=work.intruder)
    run = await measured_run(client, workload, load, pid, _ignore)
    figures |= _of_texts(run) if work.embeds else _of_run(run) | _of_intrusion(run, undisturbed)
    bounds = (CUT_OFF, NOT_SENT)
    failures = {outcome: count for outcome, count in run.metrics.failures.items() if outcome not in bounds}
    return Cell(
        work.name, name, round_, figures, run.metrics.failures.get(CUT_OFF, 0), failures, run, undisturbed=undisturbed
    )


async def _warm_up(work: StandardWork, client: Client, round_: int) -> None:
    """As many at once as will be measured, but short: after a standstill, and before a first use of that batch size."""
    warm = dataclasses.replace(
        work, requests=work.concurrency, shared_prefix=0, prompt_tokens=min(64, work.prompt_tokens), output_tokens=4
    )
    requests = warm.workload(WARMUP_SEED_OFFSET + round_)
    await measured_run(client, requests, warm.load(WARMUP_S), None, _ignore)


async def _prefix_reuse(work: StandardWork, client: Client, round_: int) -> dict[str, float]:
    """One after the other, so that nothing but the prompt is waited for; leaves the prefix in the server's cache."""
    alone = dataclasses.replace(work, concurrency=1, requests=1 + LATER_PROMPTS, output_tokens=1)
    prompts = alone.workload(WARMUP_SEED_OFFSET + round_, prefix_seed=round_)
    run = await measured_run(client, prompts, alone.load(WARMUP_S), None, _ignore)
    first, *later = [timeline.first_token for timeline in run.timelines]
    known = [seconds for seconds in later if seconds is not None]
    return {REUSE: statistics.median(known) / first} if first and known else {}


def _of_run(run: Run) -> dict[str, float]:
    metrics, cpu = run.metrics, sum(run.cpu_s.values())
    figures = {RATE: metrics.streamed_tok_per_s, "total tok/s": metrics.total_tok_per_s}
    if cpu:
        figures[PER_CPU] = metrics.streamed_tok_per_s * metrics.wall_s / cpu
    for figure, seconds in (
        ("TTFT p50, ms", metrics.ttft.p50),
        ("TPOT p50, ms", metrics.tpot.p50),
        ("ITL p99, ms", metrics.itl.p99),
    ):
        if seconds is not None:
            figures[figure] = 1000 * seconds
    return figures


def _of_texts(run: Run) -> dict[str, float]:
    metrics, cpu = run.metrics, sum(run.cpu_s.values())
    figures = {TEXTS: metrics.req_per_s}
    if cpu and metrics.completed:
        figures[TEXTS_PER_CPU] = metrics.completed / cpu
        if WORKER in run.cpu_s:
            figures[OVERHEAD] = 1000 * (cpu - run.cpu_s[WORKER]) / metrics.completed
    for figure, seconds in (("latency p50, ms", metrics.e2el.p50), ("latency p99, ms", metrics.e2el.p99)):
        if seconds is not None:
            figures[figure] = 1000 * seconds
    return figures


def _of_intrusion(run: Run, undisturbed: Run | None) -> dict[str, float]:
    if undisturbed is None:
        return {}
    disturbed, before = (Distribution.of(steady_gaps(some.timelines)) for some in (run, undisturbed))
    if not (disturbed.p99 and before.p99 and before.p50):
        return {}
    return {
        DISTURBED: 1000 * disturbed.p99,
        "p99 ITL, with over without": disturbed.p99 / before.p99,
        "p99 ITL with over p50 without": disturbed.p99 / before.p50,
    }


def _ignore(timeline: Timeline) -> None:
    """Discard a timeline: a comparison reports its progress by cell."""


def rate_of(cell: Cell) -> str:
    """Return the figure of a cell that says how much was done."""
    return TEXTS if TEXTS in cell.figures else RATE


def failed(cells: Sequence[Cell]) -> int:
    return sum(sum(cell.failures.values()) for cell in cells)
