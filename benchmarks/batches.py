"""`python -m benchmarks.batches --model DIR`: what users wait for, alone and beside a batch that runs.

The same interactive load in turns without a batch and with one (`/v1/batches`), on one server of this checkout: a
closed loop, or with `--every` one request every so many seconds. The table has p50 and p99 of the times at the client
over all rounds, and their ratio. The requests of the batch that ended meanwhile are counted, and the load average is
printed before and after.

Knows the routes of files and batches. It does not know how the server schedules them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import server
from deploy.bench.client import Client
from deploy.bench.metrics import Distribution, Metrics, measure
from deploy.bench.timeline import Timeline
from deploy.bench.workload import Workload, plan

START_SECONDS = 120.0
REQUEST_SECONDS = 300.0
RUN_SECONDS = 600.0
# Requests of a batch: more than end within a run.
BATCH_REQUESTS = 5_000
# Their prompts share nothing with those of users.
BATCH_SEED = 7_000_000
POLL_SECONDS = 0.2


@dataclass
class Side:
    """The time lines of all rounds of one kind, and the batch's requests that ended beside them."""

    timelines: list[Timeline] = field(default_factory=list)
    planned: int = 0
    batch_completed: int = 0
    seconds: float = 0.0

    def metrics(self) -> Metrics:
        return measure(self.timelines, self.planned)


class Batches:
    """The files and batches of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def begin(self, workload: Workload) -> str:
        """Sends a batch, and waits until its first request has ended. Returns its id."""
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", b"\n".join(map(orjson.dumps, _lines(workload))), filename="batch.jsonl")
        file = await self._ask("POST", "/v1/files", data=form)
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        name: str = (await self._ask("POST", "/v1/batches", json=body))["id"]
        await self._wait(name, lambda batch: batch["request_counts"]["completed"] > 0)
        return name

    async def completed(self, name: str) -> int:
        return int((await self._ask("GET", f"/v1/batches/{name}"))["request_counts"]["completed"])

    async def end(self, name: str) -> None:
        """Cancels a batch, and waits until nothing of it runs."""
        await self._ask("POST", f"/v1/batches/{name}/cancel")
        await self._wait(name, lambda batch: batch["status"] == "cancelled")

    async def _wait(self, name: str, condition: Any) -> None:
        async with asyncio.timeout(REQUEST_SECONDS):
            while not condition(await self._ask("GET", f"/v1/batches/{name}")):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, method: str, path: str, **content: Any) -> Any:
        async with self._session.request(method, self._url + path, **content) as response:
            if response.status != 200:
                raise server.ServerError(f"{path} answered {response.status}: {(await response.text())[:300]}")
            return await response.json()


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    print(f"load average {os.getloadavg()[0]:.2f}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        port = server.free_port()
        flags = [str(options.model), "--batch-dir", f"{folder}/batches", *options.flags]
        server.compile_kernels()
        log = Path(folder, "log")
        with server.running(server.serve_command(port, flags), log) as process:
            url = f"http://127.0.0.1:{port}"
            uvloop.run(server.wait_until_ready(url, process, log, START_SECONDS))
            alone, beside = uvloop.run(compare(url, options))
    show(alone, beside)
    print(f"load average {os.getloadavg()[0]:.2f}", file=sys.stderr)
    failures = alone.metrics().failures | beside.metrics().failures
    if failures:
        print(f"requests failed: {failures}", file=sys.stderr)
    return 1 if failures else 0


async def compare(url: str, options: argparse.Namespace) -> tuple[Side, Side]:
    """Runs the load alone and beside a batch, in turns; the order changes from round to round."""
    alone, beside = Side(), Side()
    client = Client(url, await server.model_name(url, None), REQUEST_SECONDS)
    workload = Workload(options.requests, options.prompt_tokens, options.output_tokens, 0.5, 0, 100, 999)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS)) as session:
        batches = Batches(session, url)
        await _run(client, replace(workload, requests=options.concurrency, seed=BATCH_SEED - 1), options, Side())
        for number in range(options.rounds):
            order = (alone, beside) if number % 2 == 0 else (beside, alone)
            for side in order:
                # No run finds the prompts of another one in the prefix cache.
                seeded = replace(workload, seed=2 * number + (side is beside))
                name = await batches.begin(_of_batch(workload, number)) if side is beside else ""
                before = await batches.completed(name) if name else 0
                await _run(client, seeded, options, side)
                if name:
                    side.batch_completed += await batches.completed(name) - before
                    await batches.end(name)
    return alone, beside


async def _run(client: Client, workload: Workload, options: argparse.Namespace, side: Side) -> None:
    planned = plan(workload)
    if options.every:
        times = [options.every * number for number in range(1, len(planned) + 1)]
        found = await client.arrivals(planned, times, RUN_SECONDS)
    else:
        found = await client.run(planned, options.concurrency, RUN_SECONDS, lambda _: None)
    side.timelines += found
    side.planned += len(planned)
    side.seconds += max(timeline.ended for timeline in found) - min(timeline.sent for timeline in found)


def _of_batch(workload: Workload, number: int) -> Workload:
    return replace(workload, requests=BATCH_REQUESTS, seed=BATCH_SEED + number)


def _lines(workload: Workload) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": request.prompt,
                "max_tokens": request.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for i, request in enumerate(plan(workload))
    ]


def show(alone: Side, beside: Side) -> None:
    """Prints both sides and their ratios."""
    ours, theirs = alone.metrics(), beside.metrics()
    table = Table("ms", "alone", "beside a batch", "ratio", title=f"{ours.completed} and {theirs.completed} requests")
    for name in ("ttft", "itl", "e2el"):
        first: Distribution = getattr(ours, name)
        second: Distribution = getattr(theirs, name)
        for part in ("p50", "p99"):
            a, b = getattr(first, part), getattr(second, part)
            if a is not None and b is not None:
                table.add_row(f"{name.upper()} {part}", f"{1e3 * a:.1f}", f"{1e3 * b:.1f}", f"{b / a:.2f}")
    Console().print(table)
    print(f"the batch: {beside.batch_completed} requests ended in {beside.seconds:.0f} s beside the users'")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batches",
        description="Times of an interactive load, alone and beside a batch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the model (python -m benchmarks.standard_model DIR)")
    add("--rounds", type=int, default=3, help="runs of each kind")
    add("--requests", type=int, default=40, help="requests of a run")
    add("--concurrency", type=int, default=4, help="requests in flight")
    add("--every", type=float, default=0.0, help="send one every so many seconds, in place of a closed loop")
    add("--prompt-tokens", type=int, default=128, help="mean length of prompts, of users and of the batch")
    add("--output-tokens", type=int, default=64, help="mean length of answers")
    add("flags", nargs="*", help="flags of the server, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
