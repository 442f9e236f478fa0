"""`make cases CASES=DIR`: runs a folder of case scripts against this checkout and prints what came of each.

A case is a script that exits with 0 if the product behaves rightly. `NN_*.py` is a client: it gets the base URL and the
model's name of one server that all clients share. `cNN_*.py` is an operator: it gets this checkout and starts servers
itself. Files with other names belong to the cases.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.system.server import Server

CHECKOUT = Path(__file__).parents[1]
CLIENT = re.compile(r"\d\d_.*\.py")
OPERATOR = re.compile(r"c\d\d_.*\.py")
CLEANING_SECONDS = 90.0
"""What a case that is out of time gets after SIGTERM to end the servers that it has started."""
SHOWN_LINES = 20
"""Of the output of a case that is not right."""


@dataclass(frozen=True)
class Outcome:
    case: str
    result: str
    seconds: float
    output: str

    @property
    def right(self) -> bool:
        return self.result == "right"

    def __str__(self) -> str:
        return f"{self.result:9} {self.seconds:7.1f} s  {self.case}"


def cases_in(folder: Path, form: re.Pattern[str], only: str = "") -> list[Path]:
    return sorted(path for path in folder.iterdir() if form.fullmatch(path.name) and only in path.name)


def run_case(case: Path, arguments: Sequence[str], seconds: float) -> Outcome:
    """What the case says of itself: `right` (0), `wrong` (1), `exit N`, or `too long` after so many seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        command = [sys.executable, str(case), *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait(seconds)
            result = {0: "right", 1: "wrong"}.get(status, f"exit {status}")
        except subprocess.TimeoutExpired:
            _end(process)
            result = "too long"
        output.seek(0)
        return Outcome(case.name, result, time.monotonic() - begun, output.read())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(CLEANING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _served(model: Path | None) -> Iterator[list[str]]:
    """The arguments of client cases, while their server runs."""
    with tempfile.TemporaryDirectory() as folder, Server(model, [], Path(folder) / "log") as server:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=90) as response:
            name = json.load(response)["data"][0]["id"]
        yield [server.url, name]


def _run_all(folder: Path, options: argparse.Namespace) -> Iterator[Outcome]:
    clients = cases_in(folder, CLIENT, options.only)
    if clients:
        with _served(options.model) as arguments:
            for case in clients:
                yield run_case(case, arguments, options.seconds)
    for case in cases_in(folder, OPERATOR, options.only):
        yield run_case(case, [str(CHECKOUT)], options.seconds)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if not options.folder.is_dir():
        print(f"cases: {str(options.folder)!r} is no folder; name one: make cases CASES=DIR", file=sys.stderr)
        return 2
    outcomes = []
    for outcome in _run_all(options.folder, options):
        outcomes.append(outcome)
        print(outcome, flush=True)
        if not outcome.right:
            print("\n".join(f"          | {line}" for line in outcome.output.splitlines()[-SHOWN_LINES:]), flush=True)
    right = sum(outcome.right for outcome in outcomes)
    print(f"{right} of {len(outcomes)} cases are right")
    return 0 if outcomes and right == len(outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cases", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="folder of the model that clients get; default: the embedded one")
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=600.0, help="that one case may take (default 600)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
