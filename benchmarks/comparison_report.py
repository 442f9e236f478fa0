"""A comparison as a table for people and as JSON for machines. The plots are in `comparison_plot.py`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cells import DISTURBED, FIGURES, OVERHEAD, PER_CPU, RATE, REUSE, TEXTS, TEXTS_PER_CPU, Cell, rate_of
from benchmarks.comparison import Comparison, Spread
from benchmarks.report import NOT_MEASURED, machine, versions
from deploy.bench.metrics import DEFINITIONS

COMPARED = (RATE, PER_CPU, DISTURBED, TEXTS, TEXTS_PER_CPU)
"""The figures of which ratios are shown; the others stand beside them."""


# The columns of each kind of work: two figures with their ratios, and those beside them.
_OF_STREAMS = ((RATE, PER_CPU), ("TTFT p50, ms", "TPOT p50, ms", "ITL p99, ms"))
_OF_TEXTS = ((TEXTS, TEXTS_PER_CPU), ("latency p50, ms", "latency p99, ms", OVERHEAD))


def print_comparison(result: Comparison, console: Console) -> None:
    vectors = [work for work in result.works if rate_of(result.first(work)) == TEXTS]
    for works, figures in (([work for work in result.works if work not in vectors], _OF_STREAMS), (vectors, _OF_TEXTS)):
        if works:
            console.print(_table(result, works, *figures))
    for work in result.works:
        for line in _beside(result, work):
            console.print(line, highlight=False)
    for start in result.starts:
        facts = ", ".join(f"{key}: {value}" for key, value in start.items() if key != "command")
        console.print(facts, highlight=False)
    for name, value in conditions(result).items():
        console.print(f"[bold]{name}[/bold]: {value}", highlight=False)
    for name, definition in FIGURES.items():
        console.print(f"[bold]{name}[/bold]: {definition}", highlight=False)


def _table(result: Comparison, works: Sequence[str], compared: Sequence[str], others: Sequence[str]) -> Table:
    """Medians over the rounds, lowest and highest in parentheses."""
    out = Table(title="ratio: ours over theirs, of the medians (lowest to highest of single rounds)")
    for column in ("work", "server"):
        out.add_column(column)
    ratios = [column for figure in compared for column in (figure, "ratio")]
    for column in (*ratios, *(figure.removesuffix(", ms") for figure in others), "cut", "failed"):
        out.add_column(column, justify="right")
    for work in works:
        for contender in result.contenders:
            cells = result.of(work, contender)
            if cells:
                columns = _columns(result, work, contender, compared, others)
                out.add_row(work, contender, *columns, *_counts(cells))
        out.add_section()
    return out


def _columns(
    result: Comparison, work: str, contender: str, compared: Sequence[str], others: Sequence[str]
) -> Iterator[str]:
    for figure in compared:
        yield _with_range(result.spread(work, contender, figure), 0)
        yield _with_range(result.ratio(work, contender, figure), 2)
    for figure in others:
        spread = result.spread(work, contender, figure)
        yield NOT_MEASURED if spread is None else f"{spread.median:.{2 if figure == OVERHEAD else 1}f}"


def _counts(cells: list[Cell]) -> tuple[str, str]:
    cut, sent = sum(cell.cut_off for cell in cells), sum(len(cell.run.timelines) for cell in cells)
    return f"{cut} of {sent}", str(sum(sum(cell.failures.values()) for cell in cells))


def _with_range(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return NOT_MEASURED
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def _beside(result: Comparison, work: str) -> Iterator[str]:
    """What the table has no column for: figures that one kind of work has alone."""
    for figure in (REUSE, DISTURBED, "p99 ITL, with over without", "p99 ITL with over p50 without"):
        for contender in result.contenders:
            spread = result.spread(work, contender, figure)
            if spread is not None:
                yield f"{work}, {contender}: {figure} {_with_range(spread, 3)}"


def conditions(result: Comparison) -> dict[str, Any]:
    return {
        "a cell is cut off after": f"{result.time_limit:g} s",
        "threads of each server": result.threads,
        "sampling": "temperature 0, ignore_eos, token-id prompts, where the server takes them",
        "load average before and after": f"{result.load_before:.2f}, {result.load_after:.2f}",
        "most CPU used by waiting servers": f"{max(cell.idle_cpu_share for cell in result.cells):.1%} of a core",
        "machine": machine(),
        "versions": versions(),
        "left out": ", ".join(result.left_out) or "nothing",
    }


def write_comparison(result: Comparison, path: Path) -> None:
    content = {
        "conditions": conditions(result) | {"servers": result.starts},
        "definitions": dict(FIGURES) | DEFINITIONS,
        "summary": [entry for work in result.works for entry in _summary(result, work)],
        "cells": [_cell(cell) for cell in result.cells],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _summary(result: Comparison, work: str) -> Iterator[dict[str, Any]]:
    for contender in result.contenders:
        for figure in FIGURES:
            spread = result.spread(work, contender, figure)
            if spread is None:
                continue
            entry: dict[str, Any] = {"work": work, "server": contender, "figure": figure}
            entry |= dataclasses.asdict(spread)
            ratio = result.ratio(work, contender, figure) if figure in COMPARED else None
            yield entry | ({"ours over it": dataclasses.asdict(ratio)} if ratio else {})


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "work": cell.work,
        "server": cell.contender,
        "round": cell.round,
        "figures": cell.figures,
        "cut_off": cell.cut_off,
        "failures": cell.failures,
        "idle_cpu_share": cell.idle_cpu_share,
        "workload": dataclasses.asdict(cell.run.workload),
        "metrics": dataclasses.asdict(cell.run.metrics),
        "cpu_s": cell.run.cpu_s,
        "client_cpu_percent": cell.run.client_cpu_percent,
    }
