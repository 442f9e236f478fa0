"""`python -m benchmarks`: reads the flags, has a server ready, runs the load, writes the reports.

Without --url a server of this checkout is started for the benchmark, with the flags after `--`. Exit code 1 means
that a request failed or that there was no server to measure: figures of such a run are not to be quoted.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import server
from benchmarks.plot import write_plot
from benchmarks.report import Report, print_report, write_json
from benchmarks.run import Load, Run, failed, measured_run
from deploy.bench.client import Client, Form
from deploy.bench.timeline import Timeline
from deploy.bench.workload import Workload

SHORT = {"requests": 8, "concurrency": 4, "prompt_tokens": 32, "output_tokens": 16, "warmup": 2, "time_limit": 120.0}
WARMUP_SEED_OFFSET = 1_000_000
"""Warm-up prompts must not be those of the run: a prefix cache would have them."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:split])
    serve_flags = arguments[split + 1 :]
    if options.short:
        vars(options).update(SHORT)
    if options.url and serve_flags:
        _parser().error("flags after -- are for a server that the benchmark starts: leave out --url, or them")
    try:
        return _benchmark(options, serve_flags)
    except (server.ServerError, ValueError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1


def _benchmark(options: argparse.Namespace, serve_flags: Sequence[str]) -> int:
    workload = Workload(
        requests=options.requests,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        spread=options.spread,
        seed=options.seed,
        first_token_id=options.first_token_id,
        last_token_id=options.last_token_id,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / time.strftime("bench-%Y%m%d-%H%M%S")
    if options.url:
        report = uvloop.run(_measure(options, workload, options.url.rstrip("/"), None, None))
    else:
        report = _with_own_server(options, workload, serve_flags, stem.with_suffix(".log"))
    print_report(report, Console())
    write_json(report, stem.with_suffix(".json"))
    write_plot(report.runs, f"{report.model}, {options.concurrency} in flight", stem.with_suffix(".png"))
    print(f"written: {stem}.json, {stem}.png")
    return 1 if failed(report.runs) else 0


def _with_own_server(options: argparse.Namespace, workload: Workload, serve_flags: Sequence[str], log: Path) -> Report:
    port = server.free_port()
    command, url = server.serve_command(port, serve_flags), f"http://127.0.0.1:{port}"
    server.compile_kernels()
    with server.running(command, log) as process:
        uvloop.run(server.wait_until_ready(url, process, log, options.start_timeout))
        return uvloop.run(_measure(options, workload, url, process.pid, ["tokenyard", *command[3:]]))


async def _measure(
    options: argparse.Namespace, workload: Workload, url: str, supervisor: int | None, command: list[str] | None
) -> Report:
    if supervisor is None:
        await server.wait_until_ready(url, None, None, options.start_timeout)
    model = options.model or await server.model_name(url, options.api_key)
    client = Client(url, model, options.request_timeout, options.api_key, Form(whole=options.whole))
    load = Load(options.concurrency, options.time_limit, options.request_timeout)
    if options.warmup:
        warmup = dataclasses.replace(workload, requests=options.warmup, seed=workload.seed + WARMUP_SEED_OFFSET)
        await _run_with_bar(client, warmup, load, supervisor, "warm-up")
    seeds = range(workload.seed, workload.seed + options.repeats)
    runs = [
        await _run_with_bar(client, dataclasses.replace(workload, seed=seed), load, supervisor, f"seed {seed}")
        for seed in seeds
    ]
    return Report(runs, load, url, model, options.warmup, command)


async def _run_with_bar(client: Client, workload: Workload, load: Load, supervisor: int | None, name: str) -> Run:
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=workload.requests, tokens=0)
        tokens = 0

        def finished(timeline: Timeline) -> None:
            nonlocal tokens
            tokens += timeline.output_tokens
            progress.update(task, advance=1, tokens=tokens)

        return await measured_run(client, workload, load, supervisor, finished)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Closed-loop load on /v1/completions of an OpenAI-compatible server.",
        epilog="Flags after -- go to the server that is started: python -m benchmarks -- --max-running 64",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="server to measure, such as http://127.0.0.1:8000; without it one of this checkout is started")
    add("--model", help="model to ask for; without it the first that GET /v1/models lists")
    add("--api-key", help="sent as Bearer token")
    add("--concurrency", type=_positive, default=16, help="requests in flight")
    add("--requests", type=_positive, default=64, help="requests of a run")
    add("--prompt-tokens", type=_positive, default=128, help="mean length of a prompt")
    add("--output-tokens", type=_positive, default=64, help="mean length of an answer")
    add(
        "--spread", type=float, default=0.0, help="0: all equally long; 0.5: from half to one and a half times the mean"
    )
    add("--whole", action="store_true", help="ask for answers in one piece instead of streams: no TTFT, ITL and TPOT")
    add("--seed", type=int, default=0, help="of the workload; repeats take the following ones")
    add("--repeats", type=_positive, default=1, help="measured runs")
    add("--warmup", type=int, default=4, help="requests before the first run that are not measured")
    add("--first-token-id", type=int, default=100, help="prompts are drawn from this id ...")
    add("--last-token-id", type=int, default=999, help="... to this one; both must be in the model's vocabulary")
    add("--time-limit", type=float, default=600.0, help="seconds after which a run is cut off")
    add("--request-timeout", type=float, default=300.0, help="seconds after which a request has failed")
    add("--start-timeout", type=float, default=120.0, help="seconds for the server to become ready")
    add("--out", type=Path, default=Path("bench-results"), help="folder for the JSON, the PNG and the server's log")
    add("--short", action="store_true", help="a small run for CI: " + ", ".join(f"{k} {v}" for k, v in SHORT.items()))
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
