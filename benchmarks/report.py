"""The runs of a benchmark as a table for people and as JSON for machines. The plot is in `plot.py`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.processes import ROLES
from benchmarks.run import Load, Run
from benchmarks.server import ROOT
from deploy.bench.metrics import DEFINITIONS, Distribution

NOT_MEASURED = "-"


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that belongs with the numbers: without the conditions they say little."""

    runs: list[Run]
    load: Load
    url: str
    model: str
    warmup_requests: int
    server_command: list[str] | None

    def conditions(self) -> dict[str, Any]:
        first = self.runs[0].workload
        return {
            "url": self.url,
            "model": self.model,
            "server_command": self.server_command,
            "arrivals": f"closed loop, {self.load.concurrency} requests in flight",
            "workload": dataclasses.asdict(first) | {"seed": [run.workload.seed for run in self.runs]},
            "sampling": "temperature 0, ignore_eos",
            "prefix_reuse": "none by construction: prompts are random token ids and every run has its own seed",
            "warmup_requests": self.warmup_requests,
            "machine": machine(),
            "versions": versions(),
        }


def table(report: Report) -> Table:
    """One column a run, one row a figure."""
    out = Table(title=f"{report.model} at {report.url}", title_justify="left")
    out.add_column("figure")
    for run in report.runs:
        out.add_column(f"seed {run.workload.seed}", justify="right")
    for name, cell in _rows(report):
        out.add_row(name, *(cell(run) for run in report.runs))
    return out


def print_report(report: Report, console: Console) -> None:
    console.print(table(report))
    for name, value in report.conditions().items():
        console.print(f"[bold]{name}[/bold]: {value}", highlight=False)
    for name, definition in DEFINITIONS.items():
        console.print(f"[bold]{name}[/bold]: {definition}", highlight=False)


def write_json(report: Report, path: Path) -> None:
    left_out = ("timelines", "intruders")
    runs = [{k: v for k, v in dataclasses.asdict(run).items() if k not in left_out} for run in report.runs]
    content = {"conditions": report.conditions(), "definitions": DEFINITIONS, "runs": runs}
    path.write_text(json.dumps(content, indent=2) + "\n")


_Cell = Callable[[Run], str]


def _rows(report: Report) -> list[tuple[str, _Cell]]:
    rows: list[tuple[str, _Cell]] = [
        ("output tok/s", lambda run: f"{run.metrics.output_tok_per_s:.1f}"),
        ("total tok/s", lambda run: f"{run.metrics.total_tok_per_s:.1f}"),
        ("req/s", lambda run: f"{run.metrics.req_per_s:.2f}"),
        *_latency("TTFT", lambda run: run.metrics.ttft),
        *_latency("ITL", lambda run: run.metrics.itl),
        *_latency("TPOT", lambda run: run.metrics.tpot),
        *_latency("E2EL", lambda run: run.metrics.e2el),
        ("completed", lambda run: str(run.metrics.completed)),
        ("failures", _failures),
        ("output tokens", lambda run: str(run.metrics.output_tokens)),
        ("wall s", lambda run: f"{run.metrics.wall_s:.2f}"),
    ]
    rows += [(f"{role} CPU s per 1,000 output tokens", _cpu_cell(role)) for role in ROLES]
    return [*rows, ("client CPU %", lambda run: f"{run.client_cpu_percent:.0f}")]


def _latency(name: str, pick: Callable[[Run], Distribution]) -> list[tuple[str, _Cell]]:
    return [(f"{name} {part}, ms", _latency_cell(pick, part)) for part in ("mean", "p50", "p99")]


def _latency_cell(pick: Callable[[Run], Distribution], part: str) -> _Cell:
    def cell(run: Run) -> str:
        seconds = getattr(pick(run), part)
        return NOT_MEASURED if seconds is None else f"{1000 * seconds:.1f}"

    return cell


def _cpu_cell(role: str) -> _Cell:
    def cell(run: Run) -> str:
        seconds = run.cpu_s_per_1000_output_tokens.get(role)
        return NOT_MEASURED if seconds is None else f"{seconds:.3f}"

    return cell


def _failures(run: Run) -> str:
    return ", ".join(f"{count} x {outcome}" for outcome, count in run.metrics.failures.items()) or "0"


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.platform()}"


def versions() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=10
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("aiohttp", "numpy")},
    }
