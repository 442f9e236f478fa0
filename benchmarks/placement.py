"""`python -m benchmarks.placement [--real]`: what placement by exact prefix saves, beside least-loaded and round-robin.

The real scheduler places requests on simulated workers, which take as long for a step as a GPU with an 8B model takes.
Time is simulated too, so a run takes seconds and gives the same figures on every machine. No model, no sockets.

With `--real` it is the scheduler's process and four model workers of this machine (`placement_set.py`): tokens that are
cached are as many on every machine, times are this machine's.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from interfaces import SamplingParams, Step, StepResult, Submit, TextContext, WorkerHello
from scheduler.core import Scheduler
from scheduler.limits import Limits
from scheduler.placement_cost import Choice, Policy, choice_of, least_cost
from scheduler.sequence import Sequence as Request
from scheduler.workers import Worker

REPLICA = b"replica"
VOCABULARY = 1 << 16
# Seconds of a step, and of each token of a prompt and each row in decode in it.
STEP_SECONDS = 0.012
PROMPT_TOKEN_SECONDS = 60e-6
ROW_SECONDS = 50e-6
# Tokens of a prompt beside its system prompt, and of an answer: least and most.
QUESTION_TOKENS = (16, 96)
ANSWER_TOKENS = (32, 96)
LIMITS = Limits(
    max_running=64,
    max_batch_tokens=1024,
    max_queued=100_000,
    max_model_len=None,
    steps_in_flight=2,
    prefix_cache=True,
)


@dataclass(frozen=True)
class Scenario:
    """Requests with one of several system prompts each; none are shared where `system_prompts` is 0.

    Worker i takes `pace[i]` times as long for a step. Worker 0 is restarted at `restart_at` seconds.
    """

    name: str
    system_prompts: int = 16
    system_tokens: int = 1024
    requests: int = 256
    per_second: float = 40.0
    pace: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    restart_at: float | None = None
    seed: int = 0


SCENARIOS = (
    Scenario("shared"),
    Scenario("unique", system_prompts=0),
    Scenario("burst", per_second=1e6),
    Scenario("slow worker", pace=(1.0, 1.0, 1.0, 3.0)),
    Scenario("restarted worker", restart_at=3.0),
)


@dataclass
class Outcome:
    """What a scenario gave. Times are in seconds by request; shares are of all tokens of prompts."""

    hit_rate: float
    ideal_hit_rate: float
    queued: list[float]
    first_token: list[float]
    # Requests that were placed on each worker, by index; those of a restarted worker count from its restart.
    placed: dict[int, int] = field(default_factory=dict)


class RoundRobin:
    """The policy that gives each worker its turn."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, workers: Sequence[Worker], sequence: Request, step_tokens: int) -> list[Choice]:
        self._turn += 1
        count = max(1, len(workers))
        return [choice_of(workers[(self._turn + i) % count], sequence) for i in range(len(workers))]


def least_loaded(workers: Sequence[Worker], sequence: Request, step_tokens: int) -> list[Choice]:
    """The policy that prefers the worker with the fewest sequences."""
    return [choice_of(worker, sequence) for worker in sorted(workers, key=lambda worker: worker.rows.running)]


POLICIES: dict[str, Callable[[], Policy]] = {
    "by prefix": lambda: least_cost,
    "least loaded": lambda: least_loaded,
    "round robin": RoundRobin,
}


class SimulatedWorker:
    """Computes nothing and takes its time. Every token that it samples is 0."""

    def __init__(self, index: int, epoch: int, pace: float) -> None:
        self.hello = WorkerHello(
            device="simulated",
            index=index,
            epoch=epoch,
            pid=0,
            num_blocks=16384,
            block_size=16,
            max_rows=64,
            max_model_len=8192,
            vocab_size=VOCABULARY,
            architecture="simulated",
            dtype="float32",
            attention="none",
        )
        self.busy_until = 0.0
        # Sequences that were placed here.
        self.joined = 0
        self._pace = pace
        # Tokens of each row that are not computed.
        self._left: dict[int, int] = {}

    def run(self, step: Step, now: float) -> tuple[float, StepResult]:
        """Returns when the step is done, and its result."""
        self.joined += len(step.joins)
        for join in step.joins:
            self._left[join.row] = len(join.tokens) - join.start
        ntok = np.ones(len(step.rows), np.int32) if step.ntok is None else step.ntok
        sampled = []
        for row, count in zip(step.rows.tolist(), ntok.tolist(), strict=True):
            self._left[row] -= count
            if not self._left[row]:
                sampled.append(row)
                self._left[row] = 1
        decoding = int((ntok == 1).sum())
        work = STEP_SECONDS + PROMPT_TOKEN_SECONDS * (int(ntok.sum()) - decoding) + ROW_SECONDS * decoding
        self.busy_until = max(now, self.busy_until) + self._pace * work
        rows = np.array(sampled, np.int32)
        result = StepResult(
            incarnation=step.incarnation,
            epoch=step.epoch,
            index=self.hello.index,
            step=step.step,
            rows=rows,
            tokens=np.zeros(len(rows), np.int32),
            logprobs=None,
            errors={},
            device_us=int(1e6 * work),
        )
        return self.busy_until, result


class Simulation:
    """The scheduler and its workers on one simulated clock."""

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        self._now = 0.0
        self._scenario = scenario
        self._scheduler = Scheduler(LIMITS, 1, lambda: self._now)
        self._scheduler.policy = policy
        self._workers: dict[int, SimulatedWorker] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._arrived: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._queued: dict[int, float] = {}
        self._cached: dict[int, int] = {}
        for index in range(len(scenario.pace)):
            self._start_worker(index, 0)

    def run(self) -> Outcome:
        prompts = prompts_of(self._scenario)
        for handle, (arrival, tokens, answer) in enumerate(prompts):
            self._at(arrival, partial(self._submit, handle, tokens, answer))
        if self._scenario.restart_at is not None:
            self._at(self._scenario.restart_at, lambda: self._start_worker(0, 1))
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            self._between()
            while steps := self._scheduler.next_steps():
                for index, step in steps:
                    ready, result = self._workers[index].run(step, self._now)
                    self._at(ready, partial(self._scheduler.step_result, result))
            self._between()
            self._read_results()
        total = sum(len(tokens) for _, tokens, _ in prompts)
        ideal = shared_tokens(self._scenario, [tokens for _, tokens, _ in prompts])
        placed = {index: worker.joined for index, worker in self._workers.items()}
        times = [self._first[handle] - arrived for handle, arrived in self._arrived.items()]
        hits = sum(self._cached.values()) / total
        return Outcome(hits, ideal / total, list(self._queued.values()), times, placed)

    def _between(self) -> None:
        """What a variant does around the steps."""

    def _start_worker(self, index: int, epoch: int) -> None:
        self._workers[index] = SimulatedWorker(index, epoch, self._scenario.pace[index])
        self._scheduler.worker_hello(self._workers[index].hello)

    def _submit(self, handle: int, tokens: list[int], answer: int) -> None:
        self._arrived[handle] = self._now
        params = SamplingParams(seed=handle, max_new_tokens=answer)
        self._scheduler.submit(REPLICA, Submit(handle, TextContext.from_prompt(tokens, params)))

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _read_results(self) -> None:
        for _, results in self._scheduler.take_results():
            for handle in results.handles.tolist():
                self._first.setdefault(handle, self._now)
            self._queued |= {handle: queued / 1e6 for handle, queued in results.queued.items()}
            self._cached |= results.cached


def prompts_of(scenario: Scenario, vocabulary: int = VOCABULARY) -> list[tuple[float, list[int], int]]:
    """Arrival, tokens and length of the answer of each request. The first token of a question is its own."""
    rng = random.Random(scenario.seed)
    shared = [rng.choices(range(1, vocabulary), k=scenario.system_tokens) for _ in range(scenario.system_prompts)]
    made = []
    arrival = 0.0
    for _ in range(scenario.requests):
        arrival += rng.expovariate(scenario.per_second)
        own = rng.choices(range(1, vocabulary), k=scenario.system_tokens)
        system = rng.choice(shared) if shared else own
        question = rng.choices(range(1, vocabulary), k=rng.randint(*QUESTION_TOKENS))
        made.append((arrival, [*system, *question], rng.randint(*ANSWER_TOKENS)))
    return made


def shared_tokens(scenario: Scenario, prompts: Sequence[list[int]]) -> int:
    """Tokens that need no computing if each system prompt is computed once."""
    different = {tuple(prompt[: scenario.system_tokens]) for prompt in prompts}
    return (len(prompts) - len(different)) * scenario.system_tokens


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--requests", type=int, default=Scenario.requests, help="requests of each scenario")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and arrivals")
    parser.add_argument("--real", action="store_true", help="four model workers of this machine, and two scenarios")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second of the real set (%(default)s)")
    parser.add_argument("--model", default="", help="folder of their model; none: the embedded one")
    options = parser.parse_args()
    if options.real:
        from benchmarks import placement_set

        placement_set.compare(options.requests, options.seed, options.model, options.rate)
        return
    print("| scenario | policy | hit rate | ideal | queue p99 ms | first token p50 ms | p99 ms | requests by worker |")
    print("|---|---|---|---|---|---|---|---|")
    for scenario in SCENARIOS:
        for name, make in POLICIES.items():
            scenario = replace(scenario, requests=options.requests, seed=options.seed)
            print(row(scenario.name, name, Simulation(scenario, make()).run()))


def row(scenario: str, policy: str, outcome: Outcome) -> str:
    times = [
        np.percentile(outcome.queued, 99),
        np.percentile(outcome.first_token, 50),
        np.percentile(outcome.first_token, 99),
    ]
    shares = " ".join(str(outcome.placed[index]) for index in sorted(outcome.placed))
    rates = f"{outcome.hit_rate:.1%} | {outcome.ideal_hit_rate:.1%}"
    return f"| {scenario} | {policy} | {rates} | {' | '.join(f'{1e3 * t:.0f}' for t in times)} | {shares} |"


if __name__ == "__main__":
    main()
