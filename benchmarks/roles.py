"""`python -m benchmarks.roles`: prefill and decode on workers of their own, beside chunked prefill on all of them.

The real scheduler on simulated workers in simulated time, as in `benchmarks.placement`; with roles, a sequence that has
its first token goes to a decode worker with its K and V, by the scheduler's own shipping, over a link of so many bytes
a second. There is no setting for roles: this says whether there should be one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.placement import Scenario, SimulatedWorker, Simulation
from interfaces import KvPiece, KvTaken, ShipKv, TakeKv
from scheduler.placement_cost import Choice, Policy, least_cost
from scheduler.sequence import Sequence as Request
from scheduler.workers import Worker

# Bytes of a block of 16 tokens of a model of 8 billion parameters. What is sent here stands for them.
BLOCK_BYTES = 2 << 20
FORM = "simulated"
PROMPT_TOKENS = 2048


@dataclass(frozen=True)
class Figures:
    """Seconds: to first tokens, and between tokens."""

    first: list[float]
    between: list[float]
    seconds: float


class Timed(Simulation):
    """All workers do both."""

    def __init__(self, scenario: Scenario, policy: Policy = least_cost) -> None:
        self._last: dict[int, float] = {}
        self.between: list[float] = []
        super().__init__(scenario, policy)

    def figures(self) -> Figures:
        outcome = self.run()
        return Figures(outcome.first_token, self.between, self._now)

    def _read_results(self) -> None:
        for _, results in self._scheduler.take_results():
            for handle, token in zip(results.handles.tolist(), results.tokens.tolist(), strict=True):
                self._first.setdefault(handle, self._now)
                if token >= 0:
                    if handle in self._last:
                        self.between.append(self._now - self._last[handle])
                    self._last[handle] = self._now


class WithRoles(Timed):
    """Workers below `prefill` compute prompts and first tokens; the others all that follows."""

    def __init__(self, scenario: Scenario, prefill: int, bytes_per_second: float) -> None:
        self._prefill = prefill
        self._block_seconds = BLOCK_BYTES / bytes_per_second
        # When the link of each worker is free.
        self._free: dict[int, float] = {}
        super().__init__(scenario, self._by_role)

    def _by_role(self, workers: Sequence[Worker], sequence: Request, step_tokens: int) -> list[Choice]:
        begins = not sequence.emitted
        able = [worker for worker in workers if (worker.hello.index < self._prefill) == begins]
        return least_cost(able, sequence, step_tokens)

    def _start_worker(self, index: int, epoch: int) -> None:
        worker = SimulatedWorker(index, epoch, 1.0)
        worker.hello = replace(worker.hello, kv_form=FORM, block_bytes=1)
        self._workers[index] = worker
        self._scheduler.worker_hello(worker.hello)

    def _between(self) -> None:
        requests = self._scheduler.requests
        for index in range(self._prefill):
            worker = requests.workers[index]
            rows = worker.rows
            for row in rows.occupied().tolist():
                sequence = rows.sequence(row)
                rows.upto[row] = sequence.prompt_len  # it stands still behind its first token
                if sequence.emitted:
                    sequence.moved = True  # and stays on a worker of its role
                    requests.waiting.add(worker.give_away(row))
        for index, message in self._scheduler.next_shipments():
            self._carry(index, message)

    def _carry(self, index: int, message: object) -> None:
        match message:
            case ShipKv():
                free = max(self._now, self._free.get(index, 0.0)) + len(message.blocks) * self._block_seconds
                self._free[index] = free
                data = np.zeros(len(message.blocks), np.uint8)
                piece = KvPiece(message.incarnation, message.epoch, index, message.ticket, data)
                self._at(free, partial(self._scheduler.kv_shipped, piece))
            case TakeKv():
                taken = KvTaken(message.incarnation, message.epoch, index, message.ticket, True)
                self._at(self._now, partial(self._scheduler.kv_shipped, taken))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roles", description=__doc__)
    parser.add_argument("--workers", type=int, default=4, help="workers in all (%(default)s)")
    parser.add_argument("--requests", type=int, default=400, help="requests of each row (%(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[8, 16, 24], help="requests a second (%(default)s)")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[3, 25], help="GB/s of a link (%(default)s)")
    options = parser.parse_args()
    print(
        "| requests/s | workers | first token p50 ms | p99 ms | between tokens p50 ms | p99 ms | p99.9 ms | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    pace = (1.0,) * options.workers
    for rate in options.rates:
        scenario = Scenario("", 0, PROMPT_TOKENS, options.requests, rate, pace)
        _show(rate, f"{options.workers} both, in chunks", Timed(scenario).figures())
        for prefill in range(1, options.workers):
            for speed in options.gigabytes:
                name = f"{prefill} prefill, {options.workers - prefill} decode, {speed:g} GB/s"
                _show(rate, name, WithRoles(scenario, prefill, speed * 1e9).figures())


def _show(rate: float, name: str, found: Figures) -> None:
    first = np.percentile(found.first, (50, 99))
    between = np.percentile(found.between, (50, 99, 99.9))
    times = " | ".join(f"{1e3 * time:.0f}" for time in (*first, *between))
    print(f"| {rate:g} | {name} | {times} | {found.seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
