"""A comparison as two pictures: rates with their spread, and the latencies of all rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cells import PER_CPU, RATE, TEXTS, TEXTS_PER_CPU
from benchmarks.comparison import Comparison, Spread
from deploy.bench.timeline import Timeline

Samples = Callable[[Timeline], Sequence[float]]


def write_plots(result: Comparison, stem: Path) -> tuple[Path, Path]:
    rates, latencies = stem.with_suffix(".png"), stem.with_name(f"{stem.name}-latency.png")
    _figure(result, [("rate", _bars(RATE, TEXTS)), ("rate per CPU s", _bars(PER_CPU, TEXTS_PER_CPU))], rates)
    shown: list[tuple[str, Samples]] = [("TTFT or E2EL", _first_answer), ("ITL", lambda timeline: timeline.gaps)]
    _figure(result, [(f"{name}, ms (share)", _cumulative(samples)) for name, samples in shown], latencies)
    return rates, latencies


_Draw = Callable[[Axes, Comparison, str], None]


def _figure(result: Comparison, rows: Sequence[tuple[str, _Draw]], path: Path) -> None:
    works = result.works
    figure = Figure(figsize=(1 + 3.2 * len(works), 7), layout="constrained")
    for line, (title, draw) in zip(figure.subplots(len(rows), len(works), squeeze=False), rows, strict=True):
        for axes, work in zip(line, works, strict=True):
            draw(axes, result, work)
            axes.set_title(f"{work}: {title}", fontsize=9)
            axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _bars(*figures: str) -> _Draw:
    """Draw the first of these figures that a work has."""

    def draw(axes: Axes, result: Comparison, work: str) -> None:
        for i, contender in enumerate(result.contenders):
            found = (result.spread(work, contender, figure) for figure in figures)
            spread = next((spread for spread in found if spread is not None), Spread(0.0, 0.0, 0.0))
            whiskers = [[spread.median - spread.low], [spread.high - spread.median]]
            axes.bar(i, spread.median, yerr=whiskers, capsize=3, label=contender)
        axes.set_xticks([])

    return draw


def _cumulative(samples: Samples) -> _Draw:
    def draw(axes: Axes, result: Comparison, work: str) -> None:
        for contender in result.contenders:
            lines = [timeline for cell in result.of(work, contender) for timeline in cell.run.timelines]
            values = [value for timeline in lines for value in samples(timeline)]
            if values:
                axes.ecdf(1000 * np.array(values), label=contender)
        axes.set_xscale("log")

    return draw


def _first_answer(timeline: Timeline) -> Sequence[float]:
    """The time to the first token, or to a vector."""
    if timeline.first_token is not None:
        return [timeline.first_token]
    return [timeline.latency] if timeline.completed else []
