"""`python -m benchmarks.shipping [MODEL]`: streams of a worker that is asked to end, and those of one that is killed.

A server with two workers has streams with long prompts. One worker gets SIGTERM in their midst, so that its streams go
on at the other one with their K and V; in the second row it gets SIGKILL, so that they are computed again. For each row
the table has the longest silence of the streams that had to move. Nothing else may run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import server

START_SECONDS = 300.0
REQUEST_SECONDS = 600.0
# Token ids of words in most vocabularies.
IDS = (300, 1000)


@dataclass(frozen=True)
class Figures:
    """The longest silence of each stream, in seconds, shortest first, and how many tokens were sent."""

    name: str
    silences: list[float]
    shipped: float
    answers: list[list[int]]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    server.compile_kernels(("float32", "bfloat16"))
    found = [measured("handed over", signal.SIGTERM, options), measured("computed again", signal.SIGKILL, options)]
    table = Table("", "streams", "that moved", "silence p50, ms", "most, ms", "tokens sent")
    for one in found:
        # The other half was on the other worker.
        moved = one.silences[len(one.silences) // 2 :]
        times = (1e3 * float(np.percentile(moved, 50)), 1e3 * max(moved))
        table.add_row(
            one.name, str(len(one.silences)), str(len(moved)), *(f"{t:.0f}" for t in times), f"{one.shipped:.0f}"
        )
    Console().print(table)
    if options.dtype == "float32" and found[0].answers != found[1].answers:
        print("the answers differ", file=sys.stderr)
        return 1
    return 0


def measured(name: str, number: signal.Signals, options: argparse.Namespace) -> Figures:
    """Start a server, disturb its streams by a signal to a worker, and end it."""
    port = server.free_port()
    flags = ["--devices", "cpu,cpu", "--dtype", options.dtype, "--kv-memory", options.kv_memory]
    model = [options.model] if options.model else []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with server.running(server.serve_command(port, [*model, *flags]), log) as process:
            url = f"http://127.0.0.1:{port}"
            uvloop.run(server.wait_until_ready(url, process, log, START_SECONDS))
            return _disturbed(name, url, process.pid, number, options)


def _disturbed(name: str, url: str, pid: int, number: signal.Signals, options: argparse.Namespace) -> Figures:
    random = np.random.default_rng(options.seed)
    prompts = [random.integers(*IDS, options.prompt_tokens).tolist() for _ in range(options.streams)]
    # The workers learn how long a prompt takes, and must be two by now.
    for prompt in prompts[:2]:
        _stream(url, prompt[: options.prompt_tokens // 2], 2, threading.Event())
    _wait_for(url, "tokenyard_worker_running", 2)
    found: list[tuple[float, list[int]]] = [(0.0, [])] * options.streams
    begun = [threading.Event() for _ in prompts]

    def ask(i: int) -> None:
        found[i] = _stream(url, prompts[i], options.answer_tokens, begun[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(options.streams)]
    for thread in threads:
        thread.start()
    for event in begun:
        event.wait(REQUEST_SECONDS)
    _worker(pid).send_signal(number)
    for thread in threads:
        thread.join()
    time.sleep(1.0)  # the status is sent twice a second
    shipped = sum(_samples(url, "tokenyard_scheduler_shipped_tokens_total"))
    return Figures(name, sorted(silence for silence, _ in found), shipped, [answer for _, answer in found])


def _stream(url: str, tokens: list[int], answer: int, begun: threading.Event) -> tuple[float, list[int]]:
    """Returns the longest silence after the first token, and the answer. `begun` is set after some tokens."""
    sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "stream": True}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    silence, last, events = 0.0, 0.0, 0
    said: list[int] = []
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
        for line in response:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                silence = max(silence, now - last) if last else 0.0
                last = now
                said = json.loads(line[6:]).get("output_ids", said)
                events += 1
                if events > 4:
                    begun.set()
    begun.set()
    return silence, said


def _worker(pid: int) -> psutil.Process:
    """A process that works as a model worker: its title has the module."""
    children = psutil.Process(pid).children(recursive=True)
    return next(child for child in children if "-m model_worker " in " ".join(child.cmdline()))


def _wait_for(url: str, name: str, count: int) -> None:
    while len(_samples(url, name)) < count:
        time.sleep(0.2)


def _samples(url: str, name: str) -> list[float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=REQUEST_SECONDS) as response:
        lines = response.read().decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shipping",
        description="The silence of streams whose worker ends: handed over with K and V, and computed again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", default="", help="folder of a model; none: the embedded one")
    add("--streams", type=int, default=8, help="streams at a time")
    add("--prompt-tokens", type=int, default=1000, help="tokens of each prompt")
    add("--answer-tokens", type=int, default=200, help="tokens of each answer")
    add("--kv-memory", default="256MB", help="KV cache of each worker")
    add("--dtype", default="auto", help="as of `tokenyard serve`")
    add("--seed", type=int, default=0, help="seed of the prompts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
