"""`python -m benchmarks.replicas`: API processes and workers in numbers, and what each token costs them.

A server of this checkout without a device (`--devices none`), and simulated workers that join it as workers of another
machine do: each sleeps as long as a GPU's step takes, and answers with any token. The load is HTTP streams. For each
number of API processes and of workers the table has tokens a second, and CPU microseconds a token by role. On a machine
with few cores the load generator is the first to end; CPU times by role hold all the same. Where one scheduler ends is
measured without the others by `python -m benchmarks.scheduling`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq
from rich.console import Console
from rich.table import Table

from benchmarks import server
from benchmarks.processes import CpuTimes
from deploy.bench.client import Client
from deploy.bench.metrics import measure
from deploy.bench.workload import Workload, plan
from interfaces import UNREGISTERED, Retire, Step, StepResult, Welcome, WorkerHello, decode, encode
from shared.curve import make_peer_keys, make_server_keys
from shared.endpoints import remote_identity
from shared.sockets import connect_dealer, frames_of

START_SECONDS = 60.0
REQUEST_SECONDS = 300.0
# Seconds between two hellos of a worker, which are its heartbeats.
HELLO_SECONDS = 1
# Rows and blocks of a worker, and the token that it answers with: a letter of the embedded model.
ROWS = 256
BLOCKS = 40_000
BLOCK_SIZE = 16
TOKEN = 100
# Microseconds of a step that each token of a prompt adds.
TOKEN_US = 60


@dataclass(frozen=True)
class Figures:
    """One load: its numbers of API processes and workers, and what it took."""

    replicas: int
    workers: int
    tokens_per_second: float
    failures: int
    cpu_us: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    found = [measured(replicas, workers, options) for replicas in options.replicas for workers in options.workers]
    show(found)
    return 1 if any(figures.failures for figures in found) else 0


def measured(replicas: int, workers: int, options: argparse.Namespace) -> Figures:
    """Start a server with so many of both, load it, and end it."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        make_server_keys(keys)
        peers = [make_peer_keys(keys, f"worker-{index}") for index in range(workers)]
        port, endpoint = server.free_port(), f"tcp://127.0.0.1:{server.free_port()}"
        flags = ["--devices", "none", "--worker-endpoint", endpoint, "--curve-keys", str(keys)]
        flags += ["--api-servers", str(replicas), "--max-queued", "100000"]
        log = Path(folder, "log")
        with (
            server.running(server.serve_command(port, flags), log) as process,
            simulated(endpoint, peers, options.step / 1000),
        ):
            url = f"http://127.0.0.1:{port}"
            return uvloop.run(_load(url, process, log, (replicas, workers), options))


async def _load(url: str, process: Any, log: Path, numbers: tuple[int, int], options: argparse.Namespace) -> Figures:
    await server.wait_until_ready(url, process, log, START_SECONDS)
    client = Client(url, await server.model_name(url, None), REQUEST_SECONDS)
    concurrency = options.concurrency * numbers[1]
    workload = Workload(2 * concurrency, 32, options.output_tokens, 0.0, 1, 100, 999)
    # One round for connections, and for what each process makes at its first request.
    warm = Workload(concurrency, 32, 8, 0.0, 2, 100, 999)
    await client.run(plan(warm), concurrency, REQUEST_SECONDS, lambda _: None)
    before = CpuTimes.of(process.pid)
    found = await client.run(plan(workload), concurrency, REQUEST_SECONDS, lambda _: None)
    spent = CpuTimes.of(process.pid).since(before)
    metrics = measure(found, workload.requests)
    tokens = sum(timeline.output_tokens for timeline in found)
    seconds = max(timeline.ended for timeline in found) - min(timeline.sent for timeline in found)
    cpu = {role: 1e6 * used / max(1, tokens) for role, used in spent.items()}
    return Figures(*numbers, tokens / seconds, sum(metrics.failures.values()), cpu)


@contextmanager
def simulated(endpoint: str, peers: Sequence[Path], step_seconds: float) -> Iterator[None]:
    """Processes that pass for workers, each with the keys of a peer."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(endpoint, peer, step_seconds)) for peer in peers]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def work(endpoint: str, keys: Path, step_seconds: float) -> None:
    """Register as a worker, and answer steps in their time until the process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context: zmq.Context[Any] = zmq.Context()
    socket = connect_dealer(context, endpoint, remote_identity(keys.name), keys)
    worker = SimulatedWorker(keys.name, step_seconds)
    next_hello = 0.0
    while True:
        if time.monotonic() >= next_hello:
            socket.send(encode(worker.hello))
            next_hello = time.monotonic() + HELLO_SECONDS
        socket.poll(1000 * HELLO_SECONDS)
        for frame in frames_of(socket):
            answer = worker.answer(decode(frame))
            if answer is not None:
                socket.send(encode(answer))


class SimulatedWorker:
    """Knows of each row how many tokens it has and how many are computed. A result comes when its step's time is up."""

    def __init__(self, name: str, step_seconds: float) -> None:
        shape = (BLOCKS, BLOCK_SIZE, ROWS, 4096, 1 << 15)
        self.hello = WorkerHello("none", -1, UNREGISTERED, 0, *shape, "none", "none", "none", name=name)
        self._step_seconds = step_seconds
        self._known = np.zeros(ROWS, np.int64)
        self._computed = np.zeros(ROWS, np.int64)
        self._free = 0.0

    def answer(self, message: object) -> WorkerHello | StepResult | None:
        """The answer to a message of the scheduler, if it wants one."""
        match message:
            case Welcome():
                self.hello = replace(self.hello, index=message.index, epoch=message.epoch)
                return self.hello
            case Retire():
                raise SystemExit(f"the scheduler gave the simulated worker up: {message.reason}")
            case Step():
                return self._result(message)
        return None

    def _result(self, step: Step) -> StepResult:
        for join in step.joins:
            self._known[join.row] = len(join.tokens)
            self._computed[join.row] = join.start
        tokens = np.ones(len(step.rows), np.int64) if step.ntok is None else step.ntok
        self._computed[step.rows] += tokens
        rows = step.rows[self._computed[step.rows] == self._known[step.rows]]
        self._known[rows] += 1
        prompts = int(tokens.sum()) - len(rows)
        begun = max(self._free, time.monotonic())
        self._free = begun + self._step_seconds + TOKEN_US * 1e-6 * max(0, prompts)
        time.sleep(max(0.0, self._free - time.monotonic()))
        drawn = np.full(len(rows), TOKEN, np.int32)
        place = step.incarnation, self.hello.epoch, self.hello.index
        return StepResult(*place, step.step, rows, drawn, None, {}, device_us=1)


def show(found: Sequence[Figures]) -> None:
    """Print the table."""
    roles = ("api_server", "scheduler")
    table = Table("API processes", "workers", "tok/s", *(f"{role} us/token" for role in roles), "failed")
    for one in found:
        costs = (f"{one.cpu_us.get(role, 0.0):.1f}" for role in roles)
        table.add_row(str(one.replicas), str(one.workers), f"{one.tokens_per_second:.0f}", *costs, str(one.failures))
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas",
        description="API processes and simulated workers in numbers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=[1, 2, 4], help="numbers of API processes")
    add("--workers", type=int, nargs="+", default=[1, 2, 4], help="numbers of simulated workers")
    add("--concurrency", type=int, default=128, help="streams for each worker")
    add("--output-tokens", type=int, default=200, help="tokens of an answer")
    add("--step", type=float, default=12.0, help="milliseconds of a worker's step")
    return parser


if __name__ == "__main__":
    sys.exit(main())
