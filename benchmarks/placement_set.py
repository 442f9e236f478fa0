"""A real set of workers for `benchmarks.placement`: the scheduler's process and model workers, and one policy.

This process plays the replica: it submits prompts when they are due, and reads results. Rows, blocks and the model are
the workers' own, so a block that is said to be cached was computed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks import server
from benchmarks.placement import POLICIES, Outcome, Scenario, prompts_of, row, shared_tokens
from deploy.model_paths import resolve_model
from interfaces import Finish, Hello, Results, SamplingParams, Status, Submit, TextContext, decode, encode
from scheduler.__main__ import serve
from shared.endpoints import RunDirectory
from shared.settings import Settings
from shared.sockets import connect_dealer

WORKERS = 4
START_SECONDS = 300.0
REQUEST_SECONDS = 600.0
# Token ids below this one are words in most vocabularies, the embedded model's among them.
IDS = 1000
SCENARIOS = (
    Scenario("shared", system_tokens=512),
    Scenario("unique", system_prompts=0, system_tokens=512),
)


def compare(requests: int, seed: int, model: str, rate: float) -> None:
    """Print a row for each scenario and policy; so many requests come in a second."""
    settings = Settings(dtype="float32", kv_memory="256MB", devices=",".join(["cpu"] * WORKERS), max_running=64)
    settings = resolve_model(Settings(**{**vars(settings), "model": model}) if model else settings)
    server.compile_kernels(("float32",))
    print("| scenario | policy | hit rate | ideal | queue p99 ms | first token p50 ms | p99 ms | tokens by worker |")
    print("|---|---|---|---|---|---|---|---|")
    for scenario in SCENARIOS:
        scenario = Scenario(**{**vars(scenario), "requests": requests, "seed": seed, "per_second": rate})
        for policy in POLICIES:
            print(row(scenario.name, policy, measured(scenario, policy, settings)), flush=True)


def measured(scenario: Scenario, policy: str, settings: Settings) -> Outcome:
    """Start a set with a policy, send it a scenario, and end it."""
    with tempfile.TemporaryDirectory() as folder, _set_of_workers(Path(folder), policy, settings):
        context: zmq.Context[Any] = zmq.Context()
        try:
            return Replica(context, RunDirectory(Path(folder))).run(scenario)
        finally:
            context.destroy(linger=0)


@contextmanager
def _set_of_workers(folder: Path, policy: str, settings: Settings) -> Iterator[None]:
    run_directory = RunDirectory(folder)
    run_directory.settings_file.write_text(settings.to_json())
    place = ["--run-dir", str(folder)]
    commands = [["benchmarks.placement_set", *place, "--policy", policy]]
    commands += [["model_worker", *place, "--index", str(index), "--device", "cpu"] for index in range(WORKERS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, "-m", *command], env=environment) for command in commands]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


class Replica:
    """Knows when each request was due, and when it got its first token."""

    def __init__(self, context: zmq.Context[Any], run_directory: RunDirectory) -> None:
        self._socket = connect_dealer(context, run_directory.api_endpoint, b"replica")
        self._open: set[int] = set()
        self._sent: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._queued: dict[int, float] = {}
        self._cached: dict[int, int] = {}
        # Those that were heard since the last look.
        self._statuses: list[Status] = []
        self._next_hello = 0.0

    def run(self, scenario: Scenario) -> Outcome:
        self._wait_until_all_are_here()
        prompts = prompts_of(scenario, IDS)
        began = time.monotonic()
        left = list(enumerate(prompts))
        while left or self._open:
            while left and time.monotonic() - began >= left[0][1][0]:
                handle, (_, tokens, answer) = left.pop(0)
                self._submit(handle, tokens, answer)
            self._hear(0.001)
            if time.monotonic() - began > REQUEST_SECONDS:
                raise TimeoutError(f"{len(left) + len(self._open)} requests have not ended")
        self._statuses.clear()
        while not self._statuses:
            self._hear(0.1)
        total = sum(len(tokens) for _, tokens, _ in prompts)
        ideal = shared_tokens(scenario, [tokens for _, tokens, _ in prompts])
        times = [self._first[handle] - sent for handle, sent in self._sent.items()]
        # Tokens of the sequences that were placed on each worker.
        placed = {worker.index: worker.placed_tokens for worker in self._statuses[-1].workers}
        return Outcome(sum(self._cached.values()) / total, ideal / total, list(self._queued.values()), times, placed)

    def _wait_until_all_are_here(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not any(len(status.workers) == WORKERS and status.ready for status in self._statuses):
            self._statuses.clear()
            self._hear(0.1)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the {WORKERS} workers are not ready after {START_SECONDS:g} s")

    def _submit(self, handle: int, tokens: list[int], answer: int) -> None:
        params = SamplingParams(seed=handle, max_new_tokens=answer, ignore_eos=True)
        self._sent[handle] = time.monotonic()
        self._open.add(handle)
        self._socket.send(encode(Submit(handle, TextContext.from_prompt(tokens, params))))

    def _hear(self, seconds: float) -> None:
        """Take what comes within `seconds`, and say now and then which requests are open."""
        now = time.monotonic()
        if now >= self._next_hello:
            self._next_hello = now + 1.0
            self._socket.send(encode(Hello("replica", np.array(sorted(self._open), np.int32))))
        wait = int(1000 * seconds) + 1
        while self._socket.poll(wait):
            wait = 0
            for frame in self._socket.recv_multipart():
                self._take(decode(frame, ipc_peer=True))

    def _take(self, message: object) -> None:
        if isinstance(message, Status):
            self._statuses.append(message)
        if not isinstance(message, Results):
            return
        if message.errors:
            raise RuntimeError(f"a request failed: {next(iter(message.errors.values())).message}")
        now = time.monotonic()
        for handle, finished in zip(message.handles.tolist(), message.finished.tolist(), strict=True):
            self._first.setdefault(handle, now)
            if finished != Finish.ACTIVE:
                self._open.discard(handle)
        self._queued |= {handle: queued / 1e6 for handle, queued in message.queued.items()}
        self._cached |= message.cached


def main(argv: Sequence[str] | None = None) -> None:
    """Be the scheduler of a set, with one policy."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement_set", description=main.__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--policy", required=True, choices=list(POLICIES))
    options = parser.parse_args(argv)
    serve(options.run_dir, POLICIES[options.policy]())


if __name__ == "__main__":
    main()
