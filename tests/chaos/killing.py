"""Long forms that attack the processes: random kills and stops for minutes, and a hundred thousand hostile frames."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections import Counter, deque

import psutil

from tests.chaos.fuzz import noise, throw
from tests.chaos.streams import Heard, requests
from tests.chaos.waves import Outcome, compare, percentiles, run, run_directory, shared_memory
from tests.system.server import Server

# A successor's first constrained step waits for the process that fills masks, which takes two seconds where cores are
# slow and busy.
FLAGS = ["--dtype", "float32", "--kv-memory", "64MB", "--stall-timeout", "5", "--api-servers", "2"]
FLAGS += ["--tool-parser", "hermes"]
WORKERS = 4
DEATHS_A_MINUTE = 4
"""Of one process: the supervisor gives up after five in a row that come too soon, if nobody else does its work."""
STREAMS = 32


class _Reaper:
    """Kills or stops a random process, none so often that its supervisor has to give up."""

    def __init__(self, options: argparse.Namespace, server: Server) -> None:
        self._random, self._server = options.random, server
        self._recent: dict[tuple[str, int], deque[float]] = {
            victim: deque(maxlen=DEATHS_A_MINUTE)
            for victim in [("scheduler", 0), *(("model_worker", i) for i in range(WORKERS))]
        }
        self.done: Counter[str] = Counter()

    def strike(self) -> None:
        now = time.monotonic()
        allowed = [v for v, times in self._recent.items() if len(times) < DEATHS_A_MINUTE or now - times[0] > 61]
        for victim in self._random.sample(allowed, min(len(allowed), self._random.choice([1, 1, 1, 2]))):
            stops = victim[0] == "model_worker" and self._random.random() < 0.15
            try:
                process = self._find(*victim)
                process.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
            except (LookupError, psutil.Error):
                continue  # it is being restarted just now
            self._recent[victim].append(now)
            self.done[f"{victim[0]} {'stopped' if stops else 'killed'}"] += 1

    def _find(self, module: str, index: int) -> psutil.Process:
        for child in self._server.children():
            line = " ".join(child.cmdline()) + " "
            if f"-m {module} " in line and (module == "scheduler" or f"--index {index} " in line):
                return child
        raise LookupError(module)


def kills(options: argparse.Namespace) -> dict[str, object]:
    """Waves of streams while processes die at random; every stream against its undisturbed twin.

    In bfloat16 a replay may round otherwise, so there it is told how many streams stayed the same, and not judged.
    """
    asked = requests(STREAMS)
    memory = shared_memory()
    flags = [*FLAGS, "--dtype", options.dtype, "--devices", ",".join(["cpu"] * WORKERS)]
    outcomes: list[Outcome] = []
    quiet: list[float] = []
    with Server(options.model, flags, options.folder / "kills.log") as server:
        undisturbed = run(server, asked)
        quiet = [one.pause for one in undisturbed]
        assert not any(one.problem for one in undisturbed), [one.problem for one in undisturbed]
        reaper = _Reaper(options, server)
        end = time.monotonic() + 60 * options.minutes
        pace = 60 * options.minutes / options.kills
        over = threading.Event()

        def reap() -> None:
            while time.monotonic() < end and sum(reaper.done.values()) < options.kills:
                over.wait(options.random.uniform(0.5, 1.5) * pace)
                reaper.strike()

        thread = threading.Thread(target=reap)
        thread.start()
        while time.monotonic() < end and sum(reaper.done.values()) < options.kills:
            outcomes.append(compare(asked, undisturbed, run(server, asked)))
        over.set()
        thread.join()
        blocks = _used_blocks_at_rest(server)
    pauses = percentiles([pause for outcome in outcomes for pause in outcome.pauses])
    lost = [text for outcome in outcomes for text in outcome.lost]
    changed = [text for outcome in outcomes for text in outcome.changed]
    leaked = sorted(shared_memory() - memory)
    return {
        "passed": not lost and not leaked and blocks == 0 and not (changed and options.dtype == "float32"),
        "dtype": options.dtype,
        "kills": dict(reaper.done),
        "streams": len(outcomes) * STREAMS,
        "requests lost": len(lost),
        "streams changed": len(changed),
        "examples": [*lost[:5], *changed[:5]],
        "longest pause of a stream, p50 and p99, s": [round(value, 2) for value in pauses],
        "the same undisturbed, s": [round(value, 2) for value in percentiles(quiet)],
        "blocks in use at the end": blocks,
        "shared memory left": leaked,
    }


def fuzz(options: argparse.Namespace) -> dict[str, object]:
    """Hostile frames on both sockets while waves of streams run."""
    asked = requests(STREAMS)
    with Server(options.model, FLAGS, options.folder / "fuzz.log") as server:
        undisturbed = run(server, asked)
        directory, before = run_directory(server), set(server.processes())
        throwers = [
            threading.Thread(
                target=throw, args=(f"ipc://{directory}/{name}.sock", options.frames // 2, options.seed + i)
            )
            for i, name in enumerate(("api", "workers"))
        ]
        for thrower in throwers:
            thrower.start()
        heard: list[tuple[list[Heard], Outcome]] = []
        while any(thrower.is_alive() for thrower in throwers) or not heard:
            for name in ("api", "workers"):
                noise(directory / f"{name}.sock", 100, options.random.getrandbits(32))
            answers = run(server, asked)
            heard.append((answers, compare(asked, undisturbed, answers)))
        after = set(server.processes())
        blocks = _used_blocks_at_rest(server)
    lost = [text for _, outcome in heard for text in outcome.lost]
    changed = [text for _, outcome in heard for text in outcome.changed]
    return {
        "passed": not lost and not changed and after == before and blocks == 0,
        "frames": options.frames,
        "streams": len(heard) * STREAMS,
        "requests lost": len(lost),
        "bytes changed": len(changed),
        "examples": [*lost[:5], *changed[:5]],
        "processes ended": len(before - after),
        "blocks in use at the end": blocks,
    }


def _used_blocks_at_rest(server: Server) -> float:
    deadline = time.monotonic() + 10
    while True:
        samples = server.metrics("tokenyard_kv_blocks").items()
        used = sum(value for labels, value in samples if 'state="used"' in labels)
        if used == 0 or time.monotonic() > deadline:
            return used
        time.sleep(0.2)
