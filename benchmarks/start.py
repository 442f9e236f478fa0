"""`python -m benchmarks.start MODEL`: from `tokenyard serve` to the first token, start by start.

Starts the server, asks for one token of a prompt as soon as a port answers, stops it, and does that again. A time is
from the supervisor's command to the end of the first answer; CPU seconds are by role, until then. `--cold` gives each
start an empty folder for compiled kernels. `--beside` names another checkout, which starts in turns with this one.
Nothing else may run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import server
from benchmarks.processes import OTHER, ROLES, CpuTimes

POLL_S = 0.02
LIMIT_S = 300.0
PROMPT = list(range(100, 228))
SUMMARY = re.compile(r"^ +(\S+) +(start python .*\| ready .*)$", re.MULTILINE)
"""The line with which the supervisor says how long each phase of a process took."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("model", help="folder of a model, such as benchmarks.standard_model writes")
    parser.add_argument("--repeats", type=int, default=5, help="starts of each checkout (%(default)s)")
    parser.add_argument("--cold", action="store_true", help="without kernels kept from an earlier start")
    parser.add_argument("--beside", type=Path, help="folder of another checkout, whose starts take turns with ours")
    options = parser.parse_args(argv)
    try:
        _measure(options)
    except server.ServerError as error:
        sys.exit(str(error))
    return 0


def _measure(options: argparse.Namespace) -> None:
    checkouts = {"ours": server.ROOT} | ({"beside": options.beside.resolve()} if options.beside else {})
    if not options.cold:
        for root in checkouts.values():
            start(root, options.model)  # compiles, or reads files that are in no cache yet
    starts: dict[str, list[Start]] = {name: [] for name in checkouts}
    console = Console()
    for _ in range(options.repeats):
        for name, root in checkouts.items():
            with tempfile.TemporaryDirectory() if options.cold else contextlib.nullcontext(None) as kernels:
                done = start(root, options.model, kernels)
            starts[name].append(done)
            console.print(f"{name}: {done.seconds:.2f} s", highlight=False)
    console.print(_table(starts))
    for name, all_of_it in starts.items():
        middle = sorted(all_of_it, key=lambda one: one.seconds)[len(all_of_it) // 2]
        console.print(f"{name}, the start in the middle:\n{middle.phases}", highlight=False)


@dataclass(frozen=True)
class Start:
    """`seconds` to the first token; CPU seconds until then by role; `phases` from the supervisor's log."""

    seconds: float
    cpu: dict[str, float]
    phases: str


def start(root: Path, model: str, kernels: str | None = None) -> Start:
    """One start of the checkout at `root`. ServerError if no token comes in five minutes."""
    port = server.free_port()
    environment = {"PYTHONPATH": str(root)} | ({"NUMBA_CACHE_DIR": kernels} if kernels else {})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        begun = time.monotonic()
        with server.running(server.serve_command(port, [model]), log, environment, root) as process:
            _first_token(f"http://127.0.0.1:{port}", model, begun + LIMIT_S, process, log)
            seconds, cpu = time.monotonic() - begun, CpuTimes.of(process.pid).since(CpuTimes({}))
        phases = "\n".join(f"  {name}: {line}" for name, line in SUMMARY.findall(log.read_text(errors="replace")))
    return Start(seconds, cpu, phases)


def _first_token(url: str, model: str, deadline: float, process: subprocess.Popen[bytes], log: Path) -> None:
    body = {"model": Path(model).name, "prompt": PROMPT, "max_tokens": 1, "stream": False}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise server.ServerError(f"the server ended with exit code {process.returncode}{server.end_of(log)}")
        try:
            with opener.open(request, timeout=LIMIT_S) as response:
                response.read()
                return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise server.ServerError(f"{error.code} {error.read().decode(errors='replace')}") from None
        except OSError:
            pass  # no process listens yet
        time.sleep(POLL_S)
    raise server.ServerError(f"no token after {LIMIT_S:g} s{server.end_of(log)}")


def _table(starts: dict[str, list[Start]]) -> Table:
    roles = (*ROLES, OTHER)
    table = Table("", "starts", "median, s", "least", "most", *(f"CPU {role}, s" for role in roles))
    for name, all_of_it in starts.items():
        seconds = [one.seconds for one in all_of_it]
        cpu = [statistics.median(one.cpu.get(role, 0.0) for one in all_of_it) for role in roles]
        figures = (statistics.median(seconds), min(seconds), max(seconds), *cpu)
        table.add_row(name, f"{len(seconds)}", *(f"{figure:.2f}" for figure in figures))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
