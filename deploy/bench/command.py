"""`tokenyard bench URL` and `tokenyard bench plot`: from flags to loads, from loads to the result file and the page."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from deploy.bench.datasets import Dataset, DatasetError
from deploy.bench.names import KEY_VARIABLE, LIMITS, PREFIX, RANDOM
from deploy.bench.page import ResultError, page, read_results
from deploy.bench.results import MOST_CLIENT_CPU_PERCENT, Level
from deploy.bench.workload import Workload
from deploy.chat import Server, ServerError, trusting
from shared.settings import SettingsError


def bench(options: argparse.Namespace) -> int:
    """Measure, print and save. Returns the exit status. Raises SettingsError for flags that cannot work."""
    if importlib.util.find_spec("aiohttp") is None:
        raise SettingsError("tokenyard bench needs aiohttp, which is missing: install tokenyard[bench]")
    levels = levels_of(options.rate, options.concurrency)
    if options.sweep and len(levels) > 1:
        raise SettingsError("--sweep doubles one load: give a single --rate or --concurrency, or leave out --sweep")
    limits = limits_of(options.goodput)
    key = options.api_key or os.environ.get(KEY_VARIABLE, "")
    try:
        dataset = dataset_of(options)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    try:
        options.url = base_of(options.url)
        model = options.model or Server(options.url, key, trusting("")).first_model()
        from deploy.bench.session import measure_all

        console = Console(stderr=True)
        results, stopped = measure_all(options, model, key, dataset, levels, limits, console)
    except DatasetError as error:
        raise SettingsError(str(error)) from None
    except ServerError as error:
        print(f"tokenyard: {error}", file=sys.stderr)
        return 1
    if options.save is not None and results:
        save(options.save, results)
    credible = report(results, console)
    if stopped:
        print(f"tokenyard: {stopped}; the loads before it are complete", file=sys.stderr)
    return 0 if credible and not stopped else 1


def base_of(url: str) -> str:
    """The server's address without a path to its API, as clients' settings have it."""
    return (url if "//" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def levels_of(rates: str, in_flight: str) -> list[Level]:
    """The loads that the flags ask for. Raises SettingsError."""
    rate_values = [_number("rate", text) for text in rates.split(",")] if rates else []
    counts = [_number("concurrency", text) for text in in_flight.split(",")] if in_flight else []
    for value in counts:
        if value != int(value):
            raise SettingsError(f"--concurrency must be whole numbers, got {value:g}")
    if len(rate_values) > 1 and len(counts) > 1:
        raise SettingsError("--rate and --concurrency cannot both be lists: give one number for one of them")
    if not rate_values:
        return [Level(None, int(count)) for count in counts or [16]]
    if len(counts) > 1:
        return [Level(rate_values[0], int(count)) for count in counts]
    return [Level(rate, int(counts[0]) if counts else None) for rate in rate_values]


def limits_of(texts: Sequence[str]) -> dict[str, float]:
    """The limits of --goodput. Raises SettingsError."""
    found = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in LIMITS or not value:
            raise SettingsError(f"--goodput must be NAME:MILLISECONDS with a name of {', '.join(LIMITS)}, got {text!r}")
        found[name] = _number("goodput", value)
    return found


def dataset_of(options: argparse.Namespace) -> Dataset:
    """The dataset that the flags name. Raises ValueError."""
    file = None if options.dataset in (RANDOM, PREFIX) else Path(options.dataset)
    if file is not None and not file.is_file():
        raise DatasetError(f"--dataset must be {RANDOM}, {PREFIX} or a file, got {options.dataset!r}")
    shared = options.dataset == PREFIX
    workload = Workload(
        requests=1,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens or 128,
        spread=options.spread,
        seed=max(0, options.seed),
        first_token_id=options.token_ids[0],
        last_token_id=options.token_ids[1],
        shared_prefix=options.prefix_tokens if shared else 0,
        prefixes=options.prefixes if shared else 1,
        prefix_seed=max(0, options.seed),
    )
    texts = options.chat or options.text or file is not None
    return Dataset(workload, texts, file, output_tokens_of_file=options.output_tokens is None)


def save(file: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write one result as `vllm bench serve` does, and several as a list of such. Raises SettingsError."""
    content = results[0] if len(results) == 1 else list(results)
    try:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--save {file} cannot be written: {error.strerror}") from None


def report(results: Sequence[Mapping[str, Any]], console: Console) -> bool:
    """Say what keeps the figures from being quoted. Returns False if anything does."""
    for one in results:
        if one["failed"]:
            failures = ", ".join(f"{count} x {outcome}" for outcome, count in one["failures"].items())
            said = f" ({one['first_refusal']})" if one["first_refusal"] else ""
            text = f"{one['failed']} of {one['num_prompts']} requests failed: {failures}{said}"
            console.print(Text(text, style="red"))
        if one["client_cpu_percent"] > MOST_CLIENT_CPU_PERCENT:
            console.print(
                f"[red]the load generator took {one['client_cpu_percent']:.0f} % of a core: it was the limit, and "
                f"these are not the server's figures. Ask for longer answers, or run several of it[/red]"
            )
    return all(one["credible"] for one in results)


def plot(options: argparse.Namespace) -> int:
    """Write the page. Returns the exit status."""
    try:
        files = [(file.stem, read_results(file)) for file in options.files]
    except ResultError as error:
        raise SettingsError(str(error)) from None
    try:
        options.output.write_text(page(files), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--output {options.output} cannot be written: {error.strerror}") from None
    print(f"written: {options.output}")
    return 0


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise SettingsError(f"--{name} must be numbers above 0, got {text!r}")
    return value
