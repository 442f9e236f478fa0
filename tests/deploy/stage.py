"""Runs a Supervisor in a process of its own, as in life, and writes what it tells as JSON lines for the test to read.

`python -m tests.deploy.stage PLAN`: PLAN is JSON, {"children": [ChildSpec fields], "policy": RestartPolicy fields,
"watch": constants of deploy/hang_watch.py}.
`Stage` starts that and reads along.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from deploy import hang_watch
from deploy.child import ChildSpec
from deploy.slot import RestartPolicy
from deploy.supervisor import Supervisor

_PATIENCE = 60.0


class Narrator:
    """An observer that writes everything down, with its time."""

    def tell(self, kind: str, **facts: Any) -> None:
        sys.stdout.write(json.dumps({"kind": kind, "at": time.monotonic(), **facts}) + "\n")
        sys.stdout.flush()

    def started(self, child: ChildSpec) -> None:
        self.tell("started", child=child.name)

    def event(self, child: ChildSpec, event: dict[str, Any]) -> None:
        self.tell("event", child=child.name, **event)

    def output(self, line: str) -> None:
        self.tell("output", line=line)

    def say(self, level: str, text: str) -> None:
        self.tell("say", level=level, text=text)

    def exited(self, child: ChildSpec, pid: int) -> None:
        self.tell("exited", child=child.name, pid=pid)

    def silent(self, child: ChildSpec, seconds: float) -> None:
        self.tell("silent", child=child.name, seconds=seconds)

    def hung(self, child: ChildSpec) -> None:
        self.tell("hung", child=child.name)

    def all_ready(self) -> None:
        self.tell("all_ready")

    def stopping(self) -> None:
        self.tell("stopping")


class Stage:
    """A supervisor on trial. Use as a context manager: nothing outlives the test."""

    def __init__(self, *children: dict[str, Any], watch: dict[str, float] | None = None, **policy: float) -> None:
        """`watch` are constants of deploy/hang_watch.py."""
        plan = json.dumps({"children": children, "policy": policy, "watch": watch or {}})
        argv = [sys.executable, "-m", "tests.deploy.stage", plan]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        self.story: list[dict[str, Any]] = []
        self._rest = b""

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_for(self, kind: str, **facts: Any) -> dict[str, Any]:
        """The next told thing that fits, reading on from where the last wait ended."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            entry = self._next(deadline)
            if entry["kind"] == kind and facts.items() <= entry.items():
                return entry
        raise AssertionError(f"no {kind} {facts}; told: {self.story}")

    def end(self) -> int:
        """Reads the rest, and returns the exit status."""
        deadline = time.monotonic() + _PATIENCE
        try:
            while True:
                self._next(deadline)
        except EOFError:
            return self.process.wait(timeout=_PATIENCE)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.story if entry["kind"] == kind]

    @property
    def said(self) -> list[str]:
        return [entry["text"] for entry in self.told("say")]

    def children(self) -> list[int]:
        """Ids of the supervisor's living children."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
            return [int(pid) for pid in file.read().split()]

    def _next(self, deadline: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._rest:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise AssertionError(f"silence; told until then: {self.story}")
            data = os.read(descriptor, 65536)
            if not data:
                raise EOFError(f"the supervisor ended; told until then: {self.story}")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        entry: dict[str, Any] = json.loads(line)
        self.story.append(entry)
        return entry


def actor(name: str, *arguments: str, **fields: Any) -> dict[str, Any]:
    """Plan entry for one actor."""
    return {"name": name, "argv": [sys.executable, "-m", "tests.deploy.actor", *arguments], **fields}


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def wait_until_dead(*pids: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.01)


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    for name, value in plan["watch"].items():
        setattr(hang_watch, name, value)
    specs = [ChildSpec(**child) for child in plan["children"]]
    sys.exit(Supervisor(specs, Narrator(), RestartPolicy(**plan["policy"])).run())
