"""A wave: all requests at once, while something happens to the server; and what it did to the streams."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from tests.chaos.streams import Heard, Request, read
from tests.system.server import Server

LOGPROB_TOLERANCE = 1e-3
"""Tokens and texts must be equal. Log-probabilities of tokens after a replay come from keys and values that were
computed together, not one by one: the last bits of floats may differ."""

Disturbance = Callable[[Server], None]


@dataclass(frozen=True)
class Outcome:
    lost: list[str]
    changed: list[str]
    pauses: list[float]

    @property
    def clean(self) -> bool:
        return not self.lost and not self.changed

    def __str__(self) -> str:
        return f"lost {self.lost[:3]}, changed {self.changed[:3]}"


def run(
    server: Server, requests: Sequence[Request], disturb: Disturbance = lambda _: None, after: float = 0.0
) -> list[Heard]:
    """All requests side by side; `disturb` comes `after` seconds."""
    timer = threading.Timer(after, disturb, [server])
    with ThreadPoolExecutor(len(requests)) as pool:
        timer.start()
        answers = list(pool.map(lambda request: read(server.port, request), requests))
    timer.join()
    return answers


def compare(requests: Sequence[Request], undisturbed: Sequence[Heard], heard: Sequence[Heard]) -> Outcome:
    lost, changed = [], []
    for i, (request, wanted, got) in enumerate(zip(requests, undisturbed, heard, strict=True)):
        if got.problem:
            lost.append(f"{i} {request.path}: {got.problem}")
        elif not _same(got.facts, wanted.facts):
            changed.append(f"{i} {request.path}")
    return Outcome(lost, changed, [one.pause for one in heard])


def _same(left: Any, right: Any) -> bool:
    mine: list[float] = []
    theirs: list[float] = []
    exact = _without_floats(left, mine) == _without_floats(right, theirs)
    return exact and all(abs(a - b) <= LOGPROB_TOLERANCE for a, b in zip(mine, theirs, strict=True))


def _without_floats(value: Any, found: list[float]) -> Any:
    """`value` with its floats taken out and put into `found`."""
    if isinstance(value, float):
        found.append(value)
        return None
    if isinstance(value, dict):
        return {key: _without_floats(each, found) for key, each in value.items()}
    return [_without_floats(each, found) for each in value] if isinstance(value, list | tuple) else value


def kill(module: str, nth: int = 0, number: signal.Signals = signal.SIGKILL) -> Disturbance:
    def disturb(server: Server) -> None:
        server.child(module, nth).send_signal(number)

    return disturb


def both(*disturbances: Disturbance) -> Disturbance:
    def disturb(server: Server) -> None:
        for one in disturbances:
            one(server)

    return disturb


def once_tokens_come(disturb: Disturbance) -> Disturbance:
    """As soon as the server has generated tokens: in the midst of a wave, however fast the machine is."""

    def wait(server: Server) -> None:
        before = server.total("tokenyard_generation_tokens_total")
        server.wait_for("tokens", 60, lambda: server.total("tokenyard_generation_tokens_total") > before)
        disturb(server)

    return wait


def kill_again_while_it_loads(server: Server) -> None:
    """The worker dies, and so does its successor, before it serves."""
    old = server.child("model_worker")
    old.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            new = server.child("model_worker")
        except (IndexError, psutil.Error):
            continue
        if new.pid != old.pid:
            time.sleep(0.7)
            new.kill()
            return
        time.sleep(0.02)
    raise AssertionError("the worker was not restarted")


def run_directory(server: Server) -> Path:
    command = " ".join(server.child("scheduler").cmdline())
    return Path(command.split("--run-dir ")[1].split()[0].rstrip("]"))


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("tokenyard-")}


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    if len(values) < 2:
        return values[0], values[0]
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]
