"""A program that stands beside a server in production, run as it is installed on this machine."""

from __future__ import annotations

import shutil
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from tests.program import Running

START_SECONDS = 30.0
SYSTEM_PATHS = f":/usr/sbin:/usr/local/sbin:{Path(sys.executable).parent}"
"""Debian puts servers there, and Python packages their programs beside the interpreter: an ordinary path lacks both."""


def find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=SYSTEM_PATHS)


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips the tests of a file on a machine without these programs."""
    missing = [name for name in names if find(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed on this machine: {', '.join(missing)}")


@dataclass
class Program(Running):
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
        self.begin([find(name) or name, *arguments], self.output, START_SECONDS, cwd=self.directory)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def is_ready(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        return True
