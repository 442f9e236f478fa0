"""`tokenyard bench plot`: result files, ours or those of `vllm bench serve`, as one HTML page that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from deploy.bench.charts import Line, chart

# Key, title and format of the table's columns.
_COLUMNS = (
    ("request_rate", "req/s asked", "g"),
    ("max_concurrency", "in flight", "d"),
    ("completed", "completed", "d"),
    ("failed", "failed", "d"),
    ("duration", "seconds", ".1f"),
    ("request_throughput", "req/s", ".2f"),
    ("request_goodput", "good req/s", ".2f"),
    ("output_throughput", "output tok/s", ".1f"),
    ("total_token_throughput", "total tok/s", ".1f"),
    ("median_ttft_ms", "TTFT median ms", ".1f"),
    ("p99_ttft_ms", "p99", ".1f"),
    ("median_tpot_ms", "TPOT median ms", ".2f"),
    ("p99_tpot_ms", "p99", ".2f"),
    ("median_itl_ms", "ITL median ms", ".2f"),
    ("p99_itl_ms", "p99", ".2f"),
    ("median_e2el_ms", "E2EL median ms", ".0f"),
    ("client_cpu_percent", "client CPU %", ".0f"),
)
# Title, keys of both axes and their names.
_CURVES = (
    ("Throughput over latency", "median_e2el_ms", "output_throughput", "median E2EL, ms", "output tok/s"),
    ("Time to the first token", "request_throughput", "p99_ttft_ms", "req/s served", "p99 TTFT, ms"),
    ("Time of a further token", "request_throughput", "median_tpot_ms", "req/s served", "median TPOT, ms"),
    ("Goodput", "request_throughput", "request_goodput", "req/s served", "good req/s"),
)
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 1.5rem }
figure { margin: 0 } figcaption { font-weight: 600; margin-bottom: .3rem }
svg { width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: currentColor }
.grid line { stroke: currentColor; opacity: .15 } polyline { stroke-width: 2; stroke-linejoin: round }
figure ul { list-style: none; margin: 0; padding: 0 4rem; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem }
figure i { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; border-radius: 2px }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap }
th:first-child, td:first-child { text-align: left } .doubtful { color: #c0392b }
"""

Result = Mapping[str, Any]


class ResultError(ValueError):
    """A result file that cannot be read; the text names it."""


def read_results(file: Path) -> list[Result]:
    """The results of a file: an object, a list of them, or one on each line. Raises ResultError."""
    try:
        text = file.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ResultError(f"the result file {file} cannot be read: {error}") from None
    results = found if isinstance(found, list) else [found]
    if not results or not all(isinstance(one, dict) and "request_throughput" in one for one in results):
        raise ResultError(
            f"the result file {file} has no results: it must be one that `tokenyard bench --save` or "
            f"`vllm bench serve --save-result` has written"
        )
    return results


def page(files: Sequence[tuple[str, Sequence[Result]]]) -> str:
    """The page. Each file is a series with a name."""
    charts = [
        *(_curve(files, *curve) for curve in _CURVES),
        _percentiles(files, "ttft"),
        _percentiles(files, "itl"),
        _over_time(files, "Requests in flight", "running", "requests"),
        _over_time(files, "Output over time", "output_tokens_per_s", "tok/s"),
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Benchmark results</title>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style><h1>Benchmark results</h1>{_about(files)}"
        f"<div class=charts>{''.join(charts)}</div>{_table(files)}</html>\n"
    )


def _about(files: Sequence[tuple[str, Sequence[Result]]]) -> str:
    lines = [
        f"<li>{escape(name)}: {escape(str(results[0].get('model_id', '')))}, "
        f"{escape(str(results[0].get('dataset', '')))} {escape(str(results[0].get('date', '')))}</li>"
        for name, results in files
    ]
    return f"<ul>{''.join(lines)}</ul>"


def _curve(files: Sequence[tuple[str, Sequence[Result]]], title: str, x: str, y: str, across: str, up: str) -> str:
    """A line for each file, with a point for each of its loads."""
    lines = []
    for name, results in files:
        known = [one for one in results if one.get(x) is not None and one.get(y) is not None]
        notes = [f"{name}, {load_of(one)}: {one[x]:.4g}, {one[y]:.4g}" for one in known]
        lines.append(Line(name, [(float(one[x]), float(one[y])) for one in known], notes))
    return chart(title, across, up, lines)


def _percentiles(files: Sequence[tuple[str, Sequence[Result]]], what: str) -> str:
    """A line for each load, with a point for each percentile that its file has."""
    lines = []
    for name, results in files:
        for one in results:
            keys = {50: f"median_{what}_ms"} | {p: f"p{p}_{what}_ms" for p in (90, 95, 99)}
            points = [(float(p), float(one[key])) for p, key in keys.items() if one.get(key) is not None]
            lines.append(Line(f"{name}, {load_of(one)}", points))
    return chart(f"Percentiles of {what.upper()}", "percentile", "ms", lines)


def _over_time(files: Sequence[tuple[str, Sequence[Result]]], title: str, key: str, up: str) -> str:
    lines = []
    for name, results in files:
        for one in results:
            seen = one.get("timeline") or {"seconds": []}
            points = list(zip(seen["seconds"], seen.get(key, ()), strict=False))
            lines.append(Line(f"{name}, {load_of(one)}", points, dots=False))
    return chart(title, "seconds", up, lines)


def _table(files: Sequence[tuple[str, Sequence[Result]]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for _, title, _ in _COLUMNS)
    rows = []
    for name, results in files:
        for one in results:
            cells = "".join(f"<td>{_cell(one.get(key), form)}</td>" for key, _, form in _COLUMNS)
            doubtful = "" if one.get("credible", True) else " class=doubtful"
            rows.append(f"<tr{doubtful}><td>{escape(name)}</td>{cells}</tr>")
    return (
        f"<h2>All loads</h2><div class=wide><table><tr><th>file</th>{head}</tr>{''.join(rows)}</table></div>"
        "<p>Red: requests failed, or the load generator took most of a core, so that it limits what is measured.</p>"
    )


def _cell(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else escape("" if value is None else str(value))


def load_of(result: Result) -> str:
    """The load of a result in words."""
    rate = result.get("request_rate")
    asked = f"{rate:g} req/s" if isinstance(rate, int | float) and rate != float("inf") else ""
    in_flight = result.get("max_concurrency")
    return ", ".join(filter(None, [asked, f"{in_flight} in flight" if in_flight else ""])) or "all at once"
