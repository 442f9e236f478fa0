"""The definitions on time lines written by hand, with the numbers worked out by hand."""

from __future__ import annotations

import pytest

from deploy.bench.metrics import Distribution, measure, steady_gaps
from deploy.bench.timeline import COMPLETED, CUT_OFF, Timeline

# TTFT 1, gaps 0.5 and 1.5, E2EL 4, TPOT (4 - 1) / (4 - 1) = 1: the four tokens came in three chunks.
LONG = Timeline(10.0, [11.0, 11.5, 13.0], 14.0, prompt_tokens=7, output_tokens=4, outcome=COMPLETED)
# TTFT 3, no gap, E2EL 3.5, a single token: no TPOT.
SINGLE = Timeline(12.0, [15.0], 15.5, prompt_tokens=5, output_tokens=1, outcome=COMPLETED)
# Completed without any text: no TTFT, no TPOT, E2EL 1.
SILENT = Timeline(12.0, [], 13.0, prompt_tokens=1, output_tokens=2, outcome=COMPLETED)
# Its chunks, tokens and latency are in no figure, but its end is the end of the run: wall time 20 - 10.
BROKEN = Timeline(11.0, [11.1, 11.2], 20.0, prompt_tokens=100, output_tokens=100, outcome="error in stream")
BUSY = Timeline(11.0, [], 11.1, outcome="HTTP 429")


def test_figures_of_a_run() -> None:
    metrics = measure([LONG, SINGLE, SILENT, BROKEN, BUSY], planned=7)
    assert metrics.wall_s == 10.0
    assert metrics.completed == 3
    assert metrics.failures == {"error in stream": 1, "HTTP 429": 1, "not sent in time": 2}
    assert (metrics.prompt_tokens, metrics.output_tokens) == (13, 7)
    assert (metrics.output_tok_per_s, metrics.total_tok_per_s, metrics.req_per_s) == (0.7, 2.0, 0.3)
    assert _numbers(metrics.ttft) == pytest.approx((2.0, 2.0, 2.98, 2))
    assert _numbers(metrics.itl) == pytest.approx((1.0, 1.0, 1.49, 2))
    assert _numbers(metrics.tpot) == pytest.approx((1.0, 1.0, 1.0, 1))
    assert _numbers(metrics.e2el) == pytest.approx((8.5 / 3, 3.5, 3.99, 3))


def _numbers(distribution: Distribution) -> tuple[float | None, ...]:
    return (distribution.mean, distribution.p50, distribution.p99, distribution.samples)


def test_a_run_without_completed_requests_has_no_latencies() -> None:
    metrics = measure([BUSY], planned=1)
    assert metrics.ttft == metrics.itl == metrics.tpot == metrics.e2el == Distribution(None, None, None, 0)
    assert metrics.output_tok_per_s == 0


def test_itl_is_pooled_over_requests_and_not_averaged_per_request() -> None:
    many = Timeline(0.0, [float(i) for i in range(10)], 9.0, output_tokens=10, outcome=COMPLETED)
    few = Timeline(0.0, [0.0, 11.0], 11.0, output_tokens=2, outcome=COMPLETED)
    assert measure([many, few], planned=2).itl.mean == (9 * 1.0 + 11.0) / 10


def test_what_was_cut_off_counts_by_chunks_at_the_tokens_per_chunk_of_the_others() -> None:
    cut = Timeline(11.0, [12.0, 13.0, 14.0], 20.0, outcome=CUT_OFF)
    # LONG had 4 tokens in 3 chunks, so the 3 chunks of the other stand for 4 tokens; both within 10 s.
    assert measure([LONG, cut], planned=2).streamed_tok_per_s == pytest.approx((4 + 4) / 10)
    assert measure([LONG, cut], planned=2).output_tok_per_s == pytest.approx(4 / 10)
    assert measure([cut], planned=1).streamed_tok_per_s == pytest.approx(3 / 9)
    assert measure([LONG, BROKEN], planned=2).streamed_tok_per_s == measure([LONG, BROKEN], planned=2).output_tok_per_s


def test_streams_are_steady_from_when_the_last_of_them_has_started() -> None:
    early = Timeline(0.0, [1.0, 2.0, 3.0, 5.0], 5.0, outcome=CUT_OFF)
    late = Timeline(0.0, [2.0, 2.5], 5.0, outcome=COMPLETED)
    never = Timeline(0.0, [], 5.0, outcome=CUT_OFF)
    assert sorted(steady_gaps([early, late, never])) == [0.5, 1.0, 2.0]
    assert steady_gaps([never]) == []
