"""Adapters that come and go under load: streams of others go on undisturbed, and memory stays flat."""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.model_worker.adapters.made import Recipe, make
from tests.system.server import Server
from tests.system.test_resilience import last_frame

# Adapters that are there all the time, and folders of those that come and go.
STEADY = 4
PASSING = 5
STREAMS = 16
LOADS = 200
LENGTH = 60
# Growth of all processes between the first fifth of the loads and the last, in bytes, that is no leak: allocators keep
# what they have had once.
FLAT = 24 << 20
# Time for one load or unload, kills included.
PATIENCE = 90.0


@dataclass
class Churned:
    """What was seen: streams that were compared, those that differed, and memory after each load, in bytes."""

    loads: int = 0
    streams: int = 0
    changed: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def growth(self) -> int:
        """Memory of the last fifth above that of the second one, by their medians."""
        part = max(1, len(self.memory) // 5)
        second, last = sorted(self.memory[part : 2 * part]), sorted(self.memory[-part:])
        return last[len(last) // 2] - second[len(second) // 2]


def prompt(number: int) -> list[int]:
    return [7 + (i * 11 + number * 5) % 400 for i in range(20 + number)]


def answer(server: Server, number: int, adapter: str | None, length: int = LENGTH) -> Any:
    """The tokens of one stream."""
    body = {
        "input_ids": prompt(number),
        "lora_path": adapter,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        frame = last_frame(connection.getresponse())
        return None if frame is None else frame.get("output_ids", frame)
    finally:
        connection.close()


def churn(
    server: Server,
    steady: list[str | None],
    folders: list[Path],
    loads: int,
    streams: int,
    disturb: Callable[[int], None] = lambda number: None,
) -> Churned:
    """Load and unload `loads` adapters while `streams` streams of steady ones and of the base run, again and again.

    Every third adapter is asked for an answer, which must be that of its content. `disturb` is called before each load.
    """
    found = Churned()
    asked = [(number, steady[number % len(steady)]) for number in range(streams)]
    truth = [answer(server, *one) for one in asked]
    over = threading.Event()
    lock = threading.Lock()

    def keep_streaming(number: int) -> None:
        while not over.is_set():
            tokens = answer(server, *asked[number])
            with lock:
                found.streams += 1
                if tokens != truth[number]:
                    found.changed.append(f"stream {number} ({asked[number][1]}): {str(tokens)[:200]}")

    threads = [threading.Thread(target=keep_streaming, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    contents: dict[Path, Any] = {}
    try:
        for number in range(loads):
            disturb(number)
            folder = folders[number % len(folders)]
            order(server, "load", lora_name="passing", lora_path=str(folder))
            if number % 3 == 0:
                tokens = answer(server, 3, "passing", 8)
                if contents.setdefault(folder, tokens) != tokens:
                    found.changed.append(f"adapter {folder.name}: {str(tokens)[:200]}")
            order(server, "unload", lora_name="passing")
            found.loads += 1
            found.memory.append(memory(server))
    finally:
        over.set()
        for thread in threads:
            thread.join(120)
    return found


def order(server: Server, what: str, **body: Any) -> None:
    """Give an operator's order, again if its answer was lost with a process."""
    deadline = time.monotonic() + PATIENCE
    again = False
    while True:
        try:
            response = httpx.post(f"{server.url}/v1/{what}_lora_adapter", json=body, timeout=30)
        except httpx.TransportError:
            response = None
        if response is not None:
            # An order whose answer was lost may have been carried out, or is being carried out.
            lost = again and response.status_code == (400 if what == "load" else 404)
            if response.status_code == 200 or (lost and (what == "unload" or is_there(server, body["lora_name"]))):
                return
            assert lost or response.status_code in (500, 503), response.text
        assert time.monotonic() < deadline, f"{what} was not carried out: {response and response.text}"
        again = True
        time.sleep(0.2)


def is_there(server: Server, name: str) -> bool:
    """Whether requests may name an adapter."""
    models = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]
    return any(each["id"] == name for each in models)


def memory(server: Server) -> int:
    """The memory of the server's processes that is their own, in bytes."""
    total = 0
    for child in server.children():
        try:
            total += child.memory_full_info().uss
        except psutil.Error:
            continue
    return total


def adapters(options: argparse.Namespace) -> dict[str, object]:
    """200 loads and unloads under 16 streams; then as many while the worker and the scheduler are killed in turns."""
    folder = options.folder / "adapters"
    names = [f"steady{i}" for i in range(STEADY)]
    for i, name in enumerate(names):
        make(options.model, folder / name, Recipe(rank=2 + i), seed=i)
    passing = [folder / f"passing{i}" for i in range(PASSING)]
    for i, each in enumerate(passing):
        make(options.model, each, Recipe(rank=3 + i), seed=100 + i)
    lora = ",".join(f"{name}={folder / name}" for name in names)
    flags = ["--dtype", options.dtype, "--kv-memory", "64MB", "--lora", lora, "--lora-dirs", str(folder)]
    steady: list[str | None] = [None, *names]
    with Server(options.model, flags, options.folder / "adapters.log") as server:
        quiet = churn(server, steady, passing, LOADS, STREAMS)
        print(f"quiet: {quiet.streams} streams, {len(quiet.changed)} changed, growth {quiet.growth}", flush=True)

        def kill(number: int) -> None:
            if number % 40 == 20:
                module = "scheduler" if number % 80 == 60 else "model_worker"
                server.child(module).send_signal(signal.SIGKILL)

        killed = churn(server, steady, passing, LOADS, STREAMS, kill)
    passed = not quiet.changed and not killed.changed and quiet.growth < FLAT
    return {
        "passed": passed,
        "loads": quiet.loads + killed.loads,
        "streams": quiet.streams,
        "streams through kills": killed.streams,
        "changed": [*quiet.changed, *killed.changed][:10],
        "growth in MB": round(quiet.growth / 1e6, 1),
        "memory in MB": [round(each / 1e6) for each in quiet.memory[:: max(1, LOADS // 10)]],
    }
