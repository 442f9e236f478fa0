"""`python -m benchmarks.scheduler_cpu`: the CPU time that a scheduler takes for a token, without sockets.

The scheduler of this process gets requests, builds steps and reads results, all of them encoded as on the wire, while
workers that compute nothing answer at once. So it measures the work of the one thread that bounds a scheduler: what
requests cost at their beginning and end, and each token. The time is the process's own, and the least of several
stretches: what else runs on the machine adds little. ZeroMQ's threads are not in it (`benchmarks.scheduling` has them).
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from interfaces import SamplingParams, Step, StepResult, Submit, TextContext, WorkerHello, decode, encode
from scheduler.core import Scheduler
from scheduler.limits import Limits

REPLICA = b"replica"
PROMPT_TOKENS = 32
BLOCK_SIZE = 16
VOCABULARY = 1000
STRETCHES = 8


class Stage:
    """A scheduler, its workers, and a replica that keeps all rows of these in use."""

    def __init__(self, workers: int, rows: int, answer: int) -> None:
        limits = Limits(rows, 2048, 10**6, None, 2, prefix_cache=True)
        self._scheduler = Scheduler(limits, 1)
        self._answer = answer
        self._random = np.random.default_rng(0)
        self._results: deque[bytes] = deque()
        self._left: list[dict[int, int]] = [{} for _ in range(workers)]
        self._handle = 0
        blocks = rows * (4 + (PROMPT_TOKENS + answer) // BLOCK_SIZE)
        for index in range(workers):
            shape = index, 0, 0, blocks, BLOCK_SIZE, rows, 4096, VOCABULARY
            self._scheduler.worker_hello(WorkerHello("none", *shape, "none", "none", "none"))
        for _ in range(workers * rows):
            self._scheduler.submit(REPLICA, self._request())
        for index, step in self._steps():
            self._run(index, step)

    def turn(self) -> tuple[float, int]:
        """One result of a worker, and all that follows. Returns seconds of CPU and the number of tokens."""
        message = self._results.popleft()
        began = time.process_time()
        result = decode(message)
        assert isinstance(result, StepResult)
        self._scheduler.step_result(result)
        published = [results for _, results in self._scheduler.take_results()]
        for results in published:
            encode(results)
        spent = time.process_time() - began
        ended = sum(int((results.finished != 0).sum()) for results in published)
        requests = [encode(self._request()) for _ in range(ended)]
        began = time.process_time()
        for request in requests:
            submit = decode(request)
            assert isinstance(submit, Submit)
            self._scheduler.submit(REPLICA, submit)
        steps = self._steps()
        spent += time.process_time() - began
        for index, step in steps:
            self._run(index, step)
        return spent, sum(len(results.tokens) for results in published)

    def _request(self) -> Submit:
        self._handle += 1
        prompt = self._random.integers(0, VOCABULARY, PROMPT_TOKENS)
        return Submit(
            self._handle, TextContext.from_prompt(prompt, SamplingParams(max_new_tokens=self._answer, seed=1))
        )

    def _steps(self) -> list[tuple[int, Step]]:
        found = []
        while steps := self._scheduler.next_steps():
            for _, step in steps:
                encode(step)
            found += steps
        return found

    def _run(self, index: int, step: Step) -> None:
        """Answer a step: each row whose prompt is computed samples the same token."""
        left = self._left[index]
        left |= {join.row: join.prompt_len - join.start for join in step.joins}
        rows = step.rows
        if step.ntok is not None:
            for row, tokens in zip(rows.tolist(), step.ntok.tolist(), strict=True):
                left[row] -= tokens
            rows = np.array([row for row in rows.tolist() if left[row] <= 0], np.int32)
        tokens = np.full(len(rows), 7, np.int32)
        self._results.append(encode(StepResult(1, 0, index, step.step, rows, tokens, None, {}, device_us=1)))


def measured(workers: int, rows: int, answer: int, turns: int) -> float:
    """Microseconds of CPU for a token."""
    stage = Stage(workers, rows, answer)
    for _ in range(workers * answer):
        stage.turn()
    found = []
    for _ in range(STRETCHES):
        spent, tokens = map(sum, zip(*(stage.turn() for _ in range(turns)), strict=True))
        found.append(1e6 * spent / max(1, tokens))
    return min(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_cpu", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8], help="numbers of workers (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 256], help="rows of each (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=100, help="tokens of an answer (%(default)s)")
    parser.add_argument("--turns", type=int, default=1000, help="steps of a stretch (%(default)s)")
    options = parser.parse_args(argv)
    table = Table("workers", "rows of each", "CPU us a token", "tokens/s of a full core")
    for workers in options.workers:
        for rows in options.rows:
            one = measured(workers, rows, options.output_tokens, options.turns)
            table.add_row(str(workers), str(rows), f"{one:.2f}", f"{1e6 / one:,.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
