"""`python -m benchmarks.scheduling`: what the scheduler process costs a step, without any model.

The real process on its real sockets; this one plays a replica and a worker that answers at once. `--cold` makes the
worker walk over memory before each answer, as a model's weights do, so that the scheduler finds its caches emptied.
CPU times are the kernel's, by thread: the loop, and ZeroMQ's input and output; the least of several stretches, because
whatever else runs on the machine adds to them. "Busy" is a worker that takes no time, so that the process always
has something to do; "one by one" gives a result when the replica has the results of the last, so that the process
sleeps and wakes for each, as it does beside a model that takes its time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from interfaces import (
    Hello,
    Results,
    SamplingParams,
    Step,
    StepResult,
    Submit,
    TextContext,
    WireError,
    WorkerHello,
    decode,
    encode,
)
from shared.endpoints import RunDirectory, worker_identity
from shared.settings import Settings
from shared.sockets import connect_dealer

PROMPT_TOKENS = 128
WARM_UP_STEPS = 50
STRETCH_STEPS = 50
BLOCK_SIZE = 16
MAX_MODEL_LEN = 100_000
POLL_MS = 30_000
SETTLED_MS = 100
COLD_BYTES = 64 * 2**20
"""More than the caches of common CPUs."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256], help="running requests (%(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps that are measured (%(default)s)")
    parser.add_argument("--cold", action="store_true", help="walk over memory before each answer")
    options = parser.parse_args(argv)
    names = [f"{place}, {how}" for how in ("busy", "one by one") for place in ("loop", "ZeroMQ")]
    table = Table("rows", *names, title="CPU time of the scheduler process, us a step")
    for rows in options.rows:
        busy, one_by_one = measure(rows, options.steps, options.cold)
        figures = (busy.loop, busy.sockets, one_by_one.loop, one_by_one.sockets)
        table.add_row(f"{rows}", *(f"{figure:.0f}" for figure in figures))
    Console().print(table)
    return 0


@dataclass(frozen=True)
class Cost:
    """Microseconds a step."""

    loop: float
    sockets: float


def measure(rows: int, steps: int, cold: bool) -> tuple[Cost, Cost]:
    """Of a busy worker, and of one that answers one by one."""
    with tempfile.TemporaryDirectory() as folder:
        run_directory = RunDirectory(Path(folder))
        run_directory.settings_file.write_text(Settings(max_running=rows, max_queued=rows + 1).to_json())
        command = [sys.executable, "-m", "scheduler", "--run-dir", folder]
        with subprocess.Popen(command) as process:
            try:
                return Stage(run_directory, rows, cold).run(process.pid, steps)
            finally:
                process.terminate()


class Stage:
    """The replica and the worker, on one thread."""

    def __init__(self, run_directory: RunDirectory, rows: int, cold: bool) -> None:
        blocks = rows * 400
        self._rows = rows
        self._hello = WorkerHello(
            "none", 0, 0, os.getpid(), blocks, BLOCK_SIZE, rows, MAX_MODEL_LEN, 1000, "none", "none", "none"
        )
        self._left: dict[int, int] = {}
        # Requests submitted so far.
        self._handles = np.empty(0, np.int32)
        self._weights = np.ones(COLD_BYTES // 8 if cold else 0)
        self._context: zmq.Context[Any] = zmq.Context()
        self._worker = connect_dealer(self._context, run_directory.worker_endpoint, worker_identity(0, 0, os.getpid()))
        self._replica = connect_dealer(self._context, run_directory.api_endpoint, b"replica")
        self._steps = 0
        self._next_hello = 0.0

    def run(self, pid: int, steps: int) -> tuple[Cost, Cost]:
        try:
            self._start()
            busy = self._least(pid, steps, one_by_one=False)
            while self._replica.poll(SETTLED_MS):  # or results of these steps would pass for those of the next
                self._replica.recv()
            return busy, self._least(pid, steps, one_by_one=True)
        finally:
            self._context.destroy(linger=0)

    def _least(self, pid: int, steps: int, one_by_one: bool) -> Cost:
        self._until(self._steps + WARM_UP_STEPS, one_by_one)
        stretches = [self._stretch(pid, one_by_one) for _ in range(max(1, steps // STRETCH_STEPS))]
        return min(stretches, key=lambda cost: cost.loop + cost.sockets)

    def _stretch(self, pid: int, one_by_one: bool) -> Cost:
        before = cpu_seconds(pid)
        self._until(self._steps + STRETCH_STEPS, one_by_one)
        return Cost(*((cpu_seconds(pid) - before) / STRETCH_STEPS * 1e6))

    def _start(self) -> None:
        """All requests run when it returns."""
        self._worker.send(encode(self._hello))
        self._say_hello()
        while not self._receive(self._replica).ready:
            pass
        for handle in range(self._rows):
            prompt = np.random.default_rng(handle).integers(0, 1000, PROMPT_TOKENS)
            sampling = SamplingParams(max_new_tokens=MAX_MODEL_LEN // 2)
            self._replica.send(encode(Submit(handle, TextContext.from_prompt(prompt, sampling))))
        self._handles = np.arange(self._rows, dtype=np.int32)
        answered: set[int] = set()
        while len(answered) < self._rows:
            self._answer(one_by_one=False)
            while self._replica.poll(0):
                update = self._receive(self._replica)
                answered |= set(update.handles.tolist()) if isinstance(update, Results) else set()

    def _until(self, steps: int, one_by_one: bool) -> None:
        while self._steps < steps:
            self._answer(one_by_one)
            while self._replica.poll(0):
                self._replica.recv()

    def _say_hello(self) -> None:
        """Keep the replica and its requests: the scheduler gives up silent replicas, and requests not named here."""
        if time.monotonic() >= self._next_hello:
            self._replica.send(encode(Hello("replica", self._handles)))
            self._next_hello = time.monotonic() + 1.0

    def _answer(self, one_by_one: bool) -> None:
        """Answer the next step."""
        self._say_hello()
        step: Step = self._receive(self._worker)
        self._weights.sum()
        rows = self._sampling(step)
        tokens = np.full(len(rows), 7, np.int32)
        result = StepResult(step.incarnation, 0, 0, step.step, rows, tokens, None, {}, device_us=1)
        self._worker.send(encode(result))
        self._steps += 1
        while one_by_one and not isinstance(self._receive(self._replica), Results):
            pass

    def _sampling(self, step: Step) -> NDArray[np.int32]:
        """Rows of a step whose prompts end with it, or have."""
        self._left |= {join.row: join.prompt_len for join in step.joins}
        if step.ntok is None:
            return step.rows
        for row, tokens in zip(step.rows.tolist(), step.ntok.tolist(), strict=True):
            self._left[row] -= tokens
        return np.array([row for row in step.rows.tolist() if self._left[row] <= 0], np.int32)

    def _receive(self, socket: zmq.Socket[bytes]) -> Any:
        if not socket.poll(POLL_MS):
            raise WireError("the scheduler says nothing")
        return decode(socket.recv())


def cpu_seconds(pid: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """CPU time so far of the process's first thread, and of all others."""
    times = {
        int(task.name): int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()
    }
    loop = times.pop(pid)
    return np.array([loop, sum(times.values())]) / 1e9


if __name__ == "__main__":
    raise SystemExit(main())
