"""Long forms that attack with load: clients that vanish or dawdle, ten times too many, one against the others, soak."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil

from tests.chaos.streams import Request, read, requests
from tests.chaos.waves import percentiles
from tests.system.server import Server
from tests.system.test_resilience import running, used_blocks

FLAGS = ["--dtype", "float32", "--kv-memory", "64MB", "--max-running", "32"]
CAPACITY = 32
WARMING = 25_000
"""Requests after which every bounded memory of the processes (journals, caches) is full."""
WAVE_SECONDS = 60.0
"""Of mixed streams, after these."""
MOST_MB_AN_HOUR = 1.0
MOST_MB_OVERLOADED = 50.0
"""What all processes together may take for ten times as many connections."""


@dataclass
class Client:
    """Asks for short streams one after the other until told to stop; remembers how it fared."""

    port: int
    key: str = ""
    tokens: int = 24
    first: list[float] = field(default_factory=list)
    refused: int = 0
    other: list[str] = field(default_factory=list)
    done: int = 0

    def run_until(self, end: float) -> None:
        while time.monotonic() < end:
            self.ask()

    def ask(self) -> None:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        body = {
            "prompt": f"{random.random()} The quick brown fox",
            "max_tokens": self.tokens,
            "stream": True,
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        started = time.monotonic()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status == http.client.TOO_MANY_REQUESTS:
                self.refused += 1
                response.read()
                time.sleep(float(response.headers["Retry-After"]))
                return
            if response.status != http.client.OK:
                self.other.append(f"{response.status} {response.read(200)!r}")
                return
            for n, _ in enumerate(line for line in response if line.startswith(b"data:")):
                if n == 0:
                    self.first.append(time.monotonic() - started)
            self.done += 1
        except (OSError, http.client.HTTPException) as error:
            self.other.append(repr(error))
        finally:
            connection.close()


def vanish(options: argparse.Namespace) -> dict[str, object]:
    """Clients that break their connection at random points: while they ask, while they wait, while they read."""
    with Server(options.model, FLAGS, options.folder / "vanish.log") as server:
        memory = _resident(server)
        with ThreadPoolExecutor(64) as pool:
            list(pool.map(lambda seed: _vanishing(server.port, seed), range(options.clients)))
        left = time.monotonic()
        _wait_until_free(server)
        freed = time.monotonic() - left
        answer = read(server.port, requests(1)[0])
        # What the metrics say is up to half a second old.
        _wait_until_free(server)
        return {
            "passed": used_blocks(server) == 0 and running(server) == 0 and not answer.problem,
            "clients": options.clients,
            "seconds until everything was free": round(freed, 2),
            "blocks in use": used_blocks(server),
            "resident memory before and after, MB": [memory, _resident(server)],
        }


def _wait_until_free(server: Server) -> None:
    with contextlib.suppress(AssertionError):
        server.wait_for("all is free", 20, lambda: used_blocks(server) == 0 and running(server) == 0)


def _vanishing(port: int, seed: int) -> None:
    rng = random.Random(seed)
    body = json.dumps({"prompt": "x" * rng.randint(1, 300), "max_tokens": 400, "stream": rng.random() < 0.7})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    message = (head + body).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=90) as connection:
        connection.sendall(message[: rng.choice([rng.randrange(len(message)), len(message), len(message)])])
        time.sleep(rng.uniform(0, 0.5))
        connection.settimeout(0.01)
        with contextlib.suppress(OSError):
            connection.recv(rng.randint(1, 2000))


def slow(options: argparse.Namespace) -> dict[str, object]:
    """Readers that take a few bytes a second, beside one that reads as fast as it can."""
    readers = options.clients // 2
    with Server(options.model, [*FLAGS, "--max-running", "64"], options.folder / "slow.log") as server:
        alone = read(server.port, requests(1)[0])
        memory = _resident(server)
        body = json.dumps({"prompt": "x", "max_tokens": 300, "stream": True, "ignore_eos": True, "logprobs": 5})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sockets = []
        for _ in range(readers):
            dawdler = socket.socket()
            dawdler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            dawdler.connect(("127.0.0.1", server.port))
            dawdler.sendall((head + body).encode())
            sockets.append(dawdler)
        end = time.monotonic() + 60 * min(options.minutes, 2)
        beside = []
        while time.monotonic() < end:
            for dawdler in sockets:
                dawdler.setblocking(False)
                with contextlib.suppress(OSError):
                    dawdler.recv(16)
            beside.append(read(server.port, requests(1)[0]))
        peak = _resident(server)
        _wait_until_free(server)
        free = used_blocks(server) == 0
        for dawdler in sockets:
            dawdler.close()
        return {
            "passed": free and all(one.facts == alone.facts for one in beside),
            "slow readers": readers,
            "streams beside them": len(beside),
            "the scheduler is free of them": free,
            "resident memory before and at the end, MB": [memory, peak],
        }


def overload(options: argparse.Namespace) -> dict[str, object]:
    """As many clients as the server can run, then ten times as many.

    Clients wait as long as a refusal tells them to. They run on the same machine: with a model that answers hundreds of
    requests a second, what refusals cost them and the server is taken from those that are served.
    """
    seconds = 60 * min(options.minutes, 2)
    flags = [*FLAGS, "--max-queued", str(CAPACITY)]
    with Server(options.model, flags, options.folder / "overload.log") as server:
        _load(server, [Client(server.port) for _ in range(CAPACITY)], 5)
        fitting = [Client(server.port) for _ in range(CAPACITY)]
        rate = _load(server, fitting, seconds)
        memory = _resident(server)
        crowd = [Client(server.port) for _ in range(10 * CAPACITY)]
        crowded = _load(server, crowd, seconds)
        after = _resident(server)
    others = [text for client in crowd for text in client.other]
    return {
        "passed": not others and crowded >= 0.95 * rate and after - memory < MOST_MB_OVERLOADED,
        "requests a second, fitting and tenfold": [round(rate, 1), round(crowded, 1)],
        "time to first token p50, p99, fitting, s": _first(fitting),
        "time to first token p50, p99, tenfold, s": _first(crowd),
        "refused with 429": sum(client.refused for client in crowd),
        "other answers": others[:3],
        "resident memory before and after, MB": [memory, after],
    }


def unfair(options: argparse.Namespace) -> dict[str, object]:
    """One key's client asks now and then; another key's hundred never stop."""
    seconds = 60 * min(options.minutes, 2)
    quiet_key, loud_key = secrets.token_urlsafe(), secrets.token_urlsafe()
    flags = [*FLAGS, f"--api-key={quiet_key},{loud_key}"]
    with Server(options.model, flags, options.folder / "unfair.log") as server:
        # In company of its own size: what a fair share of the machine gives.
        peer = [Client(server.port, loud_key) for _ in range(CAPACITY)]
        before = Client(server.port, quiet_key)
        _load(server, [*peer, before], seconds)
        crowd = [Client(server.port, loud_key) for _ in range(100)]
        quiet = Client(server.port, quiet_key)
        _load(server, [*crowd, quiet], seconds)
    p99 = _first([before])[1], _first([quiet])[1]
    return {
        "passed": p99[1] <= 2 * p99[0],
        "time to first token p50, p99 of the quiet key, full machine, s": _first([before]),
        "the same against 100 clients of another key, s": _first([quiet]),
        "of the loud key, s": _first(crowd),
    }


def soak(options: argparse.Namespace) -> dict[str, object]:
    """Mixed load for minutes: memory and file descriptors must stay flat, and idle processes idle."""
    asked = requests(14)
    with Server(options.model, FLAGS, options.folder / "soak.log") as server:
        _fill(server, WARMING)
        _fill_with_waves(server, 3 * asked)
        end = time.monotonic() + 60 * options.minutes
        samples: list[tuple[float, dict[str, Use]]] = []
        warm = time.monotonic() + 6 * options.minutes
        with ThreadPoolExecutor(len(asked)) as pool:
            while time.monotonic() < end:
                problems = [one.problem for one in pool.map(lambda r: read(server.port, r), asked) if one.problem]
                _vanishing(server.port, len(samples))
                samples.append((time.monotonic(), _by_process(server)))
                if problems:
                    return {"passed": False, "problems": problems}
        quiet = _cpu(server)
        time.sleep(5)
        idle = {name: round((seconds - quiet[name]) / 5, 4) for name, seconds in _cpu(server).items()}
    last = samples[-1][1]
    slopes, own = (
        {
            name: round(_slope([(at, kind(found[name])) for at, found in samples if at > warm and name in found]), 2)
            for name in last
        }
        for kind in (lambda use: use.resident, lambda use: use.anonymous)
    )
    files = {name: (samples[0][1][name].files if name in samples[0][1] else 0, use.files) for name, use in last.items()}
    return {
        "passed": all(share < 0.01 for share in idle.values())
        and all(before == after for before, after in files.values())
        # Over a few minutes a slope is noise.
        and (options.minutes < 30 or max(slopes.values()) < MOST_MB_AN_HOUR),
        "waves of 14 streams": len(samples),
        "memory, MB an hour after warm-up": slopes,
        "of which not mapped from files": own,
        "memory in its course, MB, in all and not from files": {
            name: [
                (round(use.resident, 1), round(use.anonymous, 1))
                for use in (samples[i * (len(samples) - 1) // 16][1].get(name) for i in range(17))
                if use
            ]
            for name in last
        },
        "file descriptors at the start and the end": files,
        "share of a core when idle": idle,
    }


def _fill(server: Server, count: int) -> None:
    """So many requests for one token, from a few clients."""
    clients = [Client(server.port, tokens=1) for _ in range(16)]
    with ThreadPoolExecutor(len(clients)) as pool:
        while sum(client.done for client in clients) < count:
            list(pool.map(lambda client: client.run_until(time.monotonic() + 5), clients))


def _fill_with_waves(server: Server, asked: list[Request]) -> None:
    """More streams at a time than will be measured, so that what the heap needs at its fullest is there before."""
    end = time.monotonic() + WAVE_SECONDS
    with ThreadPoolExecutor(len(asked)) as pool:
        while time.monotonic() < end:
            list(pool.map(lambda request: read(server.port, request), asked))


def _load(server: Server, clients: list[Client], seconds: float) -> float:
    """Requests a second."""
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=client.run_until, args=(end,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(client.done for client in clients) / seconds


def _first(clients: list[Client]) -> list[float]:
    values = [value for client in clients for value in client.first] or [float("nan")]
    return [round(value, 3) for value in percentiles(values)]


def _resident(server: Server) -> int:
    return int(sum(child.memory_info().rss for child in server.children()) // 2**20)


class Use(NamedTuple):
    resident: float
    """In MB, as `anonymous`: without pages of libraries, which the kernel takes and gives back as it likes."""
    anonymous: float
    files: int


def _by_process(server: Server) -> dict[str, Use]:
    found: dict[str, Use] = {}
    for child in server.children():
        memory = child.memory_info()
        found[_name(child)] = Use(memory.rss / 2**20, (memory.rss - memory.shared) / 2**20, child.num_fds())
    return found


def _cpu(server: Server) -> dict[str, float]:
    times: dict[str, Any] = {_name(child): child.cpu_times() for child in server.children()}
    return {name: time_.user + time_.system for name, time_ in times.items()}


def _name(child: psutil.Process) -> str:
    return " ".join(child.cmdline()).partition("[")[0].removeprefix("tokenyard: ").strip() or str(os.getpid())


def _slope(points: list[tuple[float, float]]) -> float:
    """Least squares, an hour."""
    if len(points) < 2:
        return float("nan")
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else float("nan")
