"""From the time lines of a run to its figures, with the definition of each figure beside it.

Knows time lines only. Failures are counted and shown, never dropped silently: latencies are of completed requests,
and so are the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.bench.timeline import CUT_OFF, Timeline

DEFINITIONS = {
    "output tok/s, total tok/s, req/s": "completed requests over the wall time of the run, first send to last byte, "
    "ramp and drain included; total = prompt + output; tokens as the server's `usage` counts them (include_usage)",
    "streamed tok/s": "as output tok/s, and with what the requests that the time limit cut off had streamed: their "
    "chunks with text, times the tokens per chunk of the run's completed requests (1 where none completed)",
    "TTFT": "send to the first chunk with text, at the client; role-only and empty chunks do not count",
    "ITL": "every gap between consecutive chunks with text after the first, pooled over all requests; between chunks, "
    "not tokens, where a chunk carries several (the ITL of vLLM and SGLang, not AIPerf's)",
    "TPOT": "per request (E2EL - TTFT) / (output tokens - 1), then over requests; single-token outputs are left out",
    "E2EL": "send to the last byte",
    "failures": "requests that did not complete, by status; they are in no other figure",
    "CPU s per 1,000 output tokens": "user + system time of the server's processes of one role",
    "client CPU": "CPU time of this load generator over wall time; near 100 % it is the client that is measured",
}


NOT_SENT = "not sent in time"


@dataclass(frozen=True)
class Distribution:
    """Seconds; None where there is no sample. Percentiles interpolate linearly."""

    mean: float | None
    p50: float | None
    p99: float | None
    samples: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        known = np.array([value for value in values if value is not None])
        if not len(known):
            return cls(None, None, None, 0)
        p50, p99 = np.percentile(known, [50, 99])
        return cls(float(known.mean()), float(p50), float(p99), len(known))


@dataclass(frozen=True)
class Metrics:
    """Figures of one run."""

    wall_s: float
    completed: int
    failures: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    output_tok_per_s: float
    streamed_tok_per_s: float
    total_tok_per_s: float
    req_per_s: float
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2el: Distribution


def measure(timelines: Sequence[Timeline], planned: int) -> Metrics:
    """The figures of a run of `planned` requests, of which at least one was sent."""
    good = [timeline for timeline in timelines if timeline.completed]
    wall = max(timeline.ended for timeline in timelines) - min(timeline.sent for timeline in timelines)
    failures = Counter(timeline.outcome for timeline in timelines if not timeline.completed)
    if planned > len(timelines):
        failures[NOT_SENT] = planned - len(timelines)
    prompt_tokens, output_tokens = sum(t.prompt_tokens for t in good), sum(t.output_tokens for t in good)
    return Metrics(
        wall_s=wall,
        completed=len(good),
        failures=dict(failures),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tok_per_s=output_tokens / wall,
        streamed_tok_per_s=(output_tokens + _tokens_of_cut_off(timelines)) / wall,
        total_tok_per_s=(prompt_tokens + output_tokens) / wall,
        req_per_s=len(good) / wall,
        ttft=Distribution.of(timeline.first_token for timeline in good),
        itl=Distribution.of(gap for timeline in good for gap in timeline.gaps),
        tpot=Distribution.of(timeline.per_output_token for timeline in good),
        e2el=Distribution.of(timeline.latency for timeline in good),
    )


def _tokens_of_cut_off(timelines: Sequence[Timeline]) -> float:
    good = [timeline for timeline in timelines if timeline.completed and timeline.chunks]
    chunks = sum(len(timeline.chunks) for timeline in good)
    per_chunk = sum(timeline.output_tokens for timeline in good) / chunks if chunks else 1.0
    return per_chunk * sum(len(timeline.chunks) for timeline in timelines if timeline.outcome == CUT_OFF)


def steady_gaps(timelines: Sequence[Timeline]) -> list[float]:
    """ITL samples of streams that decode together: those after the first chunk of the last of them."""
    started = [timeline for timeline in timelines if timeline.chunks]
    from_here = max((timeline.chunks[0] for timeline in started), default=0.0)
    return [
        after - before
        for timeline in started
        for before, after in zip(timeline.chunks, timeline.chunks[1:], strict=False)
        if before >= from_here
    ]
