"""A program that runs for as long as a test needs it."""

from __future__ import annotations

import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

STOP_SECONDS = 60.0


class Running(ABC):
    """From `begin` to `end`, which leaves nothing of it running. A subclass knows when it is ready."""

    process: subprocess.Popen[bytes]

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it answers; an OSError says that it does not yet."""

    def begin(self, command: Sequence[str], output: Path, seconds: float, **options: Any) -> None:
        """Starts it and waits until it is ready. What it prints goes to `output`; `options` are subprocess's."""
        with output.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
        try:
            self._wait_until_ready(output, seconds)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Asks it to end. Raises TimeoutExpired, and kills it, if it does not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        finally:
            for child in self.children():
                child.kill()
            self.process.kill()
            self.process.wait()

    def children(self) -> list[psutil.Process]:
        try:
            children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
            return children
        except psutil.NoSuchProcess:
            return []

    def _wait_until_ready(self, output: Path, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, output.read_text()
            try:
                if self.is_ready():
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds:.0f} s:\n{output.read_text()}")
