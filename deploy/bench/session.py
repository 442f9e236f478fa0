"""The loads of one `tokenyard bench`: warm-up, then each level with a bar of its progress and a line of the table."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.bench import levels as loads
from deploy.bench.client import Client, Form
from deploy.bench.datasets import Dataset
from deploy.bench.levels import Plan
from deploy.bench.names import LIMITS
from deploy.bench.results import Level, Measured, result
from deploy.bench.timeline import Timeline
from deploy.chat import ServerError
from shared.settings import SettingsError

# Key, title and format of the table's rows.
_ROWS = (
    ("completed", "completed", "d"),
    ("failed", "failed", "d"),
    ("request_throughput", "requests/s", ".2f"),
    ("request_goodput", "good requests/s", ".2f"),
    ("output_throughput", "output tok/s", ".1f"),
    ("total_token_throughput", "all tok/s", ".1f"),
    *((f"{kind}_{name}_ms", f"{name.upper()} {kind}, ms", ".1f") for name in LIMITS for kind in ("median", "p99")),
    ("max_concurrent_requests", "most in flight", "d"),
    ("client_cpu_percent", "client CPU, %", ".0f"),
)


def measure_all(
    options: argparse.Namespace,
    model: str,
    key: str,
    dataset: Dataset,
    levels: Sequence[Level],
    limits: Mapping[str, float],
    console: Console,
) -> tuple[list[dict[str, Any]], str]:
    """Run the loads and print the table. Returns the results, and what ended the loads before their time, or "".

    Raises ServerError when the warm-up shows that there is nothing to measure, and SettingsError when the first load
    cannot be.
    """
    form = Form(chat=options.chat, ignore_eos=options.ignore_eos, further=options.body)
    client = Client(options.url, model, options.request_timeout, key or None, form)
    plan = Plan(
        dataset, options.requests, options.duration, options.time_limit, options.burstiness, max(0, options.seed)
    )
    about = {
        "backend": "openai-chat" if options.chat else "openai",
        "label": options.label or None,
        "model_id": model,
        "dataset": options.dataset,
        "burstiness": options.burstiness,
    }
    wanted: Iterable[Level] = loads.doubled(levels[0]) if options.sweep else levels
    results: list[dict[str, Any]] = []
    stopped = ""
    try:
        asyncio.run(_measure(client, plan, options.warmup, wanted, about, limits, options.sweep, console, results))
    except KeyboardInterrupt:
        stopped = "interrupted"
    except (SettingsError, OSError) as error:
        if not results:
            raise
        stopped = str(error)
    if results:
        console.print(table(results))
    return results, stopped


async def _measure(
    client: Client,
    plan: Plan,
    warmup: int,
    wanted: Iterable[Level],
    about: Mapping[str, Any],
    limits: Mapping[str, float],
    sweep: bool,
    console: Console,
    results: list[dict[str, Any]],
) -> None:
    """Run the loads, and add the result of each when it has ended."""
    if warmup > 0:
        _check(await loads.warm_up(client, plan, warmup))
    done: list[Level] = []
    for level in wanted:
        measured = await _with_bar(client, plan, level, len(done), console)
        done.append(level)
        results.append(result(measured, about, limits))
        if sweep and loads.saturated(done, results):
            break


def _check(measured: Measured) -> None:
    if any(timeline.completed for timeline in measured.timelines):
        return
    said = {f"{timeline.outcome} {timeline.detail}".strip() for timeline in measured.timelines}
    raise ServerError(
        f"no request of the warm-up completed: {'; '.join(sorted(said))}\n(a server that takes no token ids wants "
        f"--text or --chat, and a small vocabulary other --token-ids)"
    )


async def _with_bar(client: Client, plan: Plan, level: Level, number: int, console: Console) -> Measured:
    columns = (TextColumn(level.name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(level.name, total=plan.count(level), tokens=0)
        tokens = 0

        def finished(timeline: Timeline) -> None:
            nonlocal tokens
            tokens += timeline.output_tokens
            progress.update(task, advance=1, tokens=tokens)

        return await loads.run(client, plan, level, number, finished)


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each load. Times are milliseconds."""
    shown = [row for row in _ROWS if any(one.get(row[0]) is not None for one in results)]
    found = Table("", *(_level(one).name for one in results))
    for column in found.columns[1:]:
        column.justify = "right"
    for key, title, form in shown:
        found.add_row(title, *("" if one.get(key) is None else format(one[key], form) for one in results))
    return found


def _level(result: Mapping[str, Any]) -> Level:
    rate = result["request_rate"]
    return Level(None if rate == "inf" else rate, result["max_concurrency"])
