"""A program that stands beside a server in production, run as it is installed on this machine."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

START_SECONDS = 30.0
STOP_SECONDS = 10.0
SYSTEM_PATHS = ":/usr/sbin:/usr/local/sbin"
"""Debian puts servers there, and the path of an ordinary user lacks it."""


def find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=SYSTEM_PATHS)


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips the tests of a file on a machine without these programs."""
    missing = [name for name in names if find(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed on this machine: {', '.join(missing)}")


@dataclass
class Program:
    """`with Program([name, *arguments], port, directory)`: it accepts connections inside, and is gone afterwards."""

    command: list[str]
    port: int
    directory: Path
    """Its working directory; its output goes to the file `output` there."""
    output: Path = field(init=False)

    def __post_init__(self) -> None:
        self.output = self.directory / "output"

    def __enter__(self) -> Self:
        name, *arguments = self.command
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [find(name) or name, *arguments], cwd=self.directory, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            self._wait_until_it_accepts()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait_until_it_accepts(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output.read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"{self.command[0]} does not listen on {self.port}:\n{self.output.read_text()}")
