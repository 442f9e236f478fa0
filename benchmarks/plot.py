"""The runs of a benchmark as one picture: throughput over time, the spread of latencies, and where CPU time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.processes import ROLES
from benchmarks.run import Run

BINS = 40


def write_plot(runs: Sequence[Run], title: str, path: Path) -> None:
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    throughput, cpu, first, gaps = figure.subplots(2, 2).flat
    for run in runs:
        _throughput(throughput, run)
        good = [timeline for timeline in run.timelines if timeline.completed]
        _cumulative(first, [t.first_token for t in good if t.first_token is not None], run)
        _cumulative(gaps, [gap for t in good for gap in t.gaps], run)
    _cpu(cpu, runs)
    _label(throughput, "Chunks with text per second", "seconds since the first request", "chunks/s")
    _label(first, "TTFT", "ms", "share of requests")
    _label(gaps, "ITL", "ms", "share of gaps")
    _label(cpu, "CPU s per 1,000 output tokens", "", "seconds")
    first.legend()
    figure.savefig(path, dpi=120)


def _throughput(axes: Axes, run: Run) -> None:
    start = min(timeline.sent for timeline in run.timelines)
    arrivals = np.array([chunk - start for timeline in run.timelines for chunk in timeline.chunks])
    counts, edges = np.histogram(arrivals, bins=BINS, range=(0.0, max(run.metrics.wall_s, 1e-9)))
    axes.stairs(counts / np.diff(edges), edges)


def _cumulative(axes: Axes, seconds: Sequence[float], run: Run) -> None:
    if seconds:
        axes.ecdf(1000 * np.array(seconds), label=f"seed {run.workload.seed}")


def _cpu(axes: Axes, runs: Sequence[Run]) -> None:
    for i, run in enumerate(runs):
        heights = [run.cpu_s_per_1000_output_tokens.get(role, 0.0) for role in ROLES]
        axes.bar(np.arange(len(ROLES)) + i / (len(runs) + 1), heights, width=1 / (len(runs) + 1))
    if not any(run.cpu_s_per_1000_output_tokens for run in runs):
        axes.text(0.5, 0.5, "not measured: no server processes in sight", ha="center", transform=axes.transAxes)
    axes.set_xticks(np.arange(len(ROLES)), ROLES)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
