"""What all peers have in common: a folder, an installation into it, a model in a form of their own, a command.

Knows pip, virtual environments and files. What is peculiar to a server is in the module named like it.
"""

from __future__ import annotations

import abc
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from benchmarks.standard_work import Needs
from deploy.bench.client import Form

PIP = (sys.executable, "-m", "pip")
TORCH = "torch==2.13.0"
SERVED_NAME = "standard"
STAMP = ".installed"


class PeerError(RuntimeError):
    """A peer cannot be installed or prepared; the text says which command failed."""


@dataclass(frozen=True)
class Start:
    """A command that serves until SIGTERM; `environment` is laid over the caller's."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Peer(abc.ABC):
    """One server of another project. `home` is its folder; a new version gets a new one."""

    name: ClassVar[str]
    version: ClassVar[str]
    form: ClassVar[Form] = Form()
    embeds: ClassVar[bool] = False
    """Whether it makes vectors, of the standard encoders, and no text."""

    def __init__(self, cache: Path) -> None:
        self.home = cache.absolute() / f"{self.name}-{self.version}"

    @property
    def installed(self) -> bool:
        return (self.home / STAMP).exists()

    def install(self) -> None:
        """Does nothing when it is done already; goes on where it broke off."""
        if self.installed:
            return
        self.home.mkdir(parents=True, exist_ok=True)
        self._install()
        (self.home / STAMP).touch()

    @abc.abstractmethod
    def _install(self) -> None: ...

    def prepared(self, model: Path) -> Path:
        """The model in the form that this peer reads, beside the original; converted once."""
        return model.absolute()

    @abc.abstractmethod
    def start(self, model: Path, port: int, needs: Needs) -> Start:
        """How to serve `model`, which `prepared` gave, on 127.0.0.1."""

    def model_name(self, model: Path) -> str:
        """What requests call the model that `prepared` gave."""
        return SERVED_NAME

    def bin(self, program: str) -> str:
        """A program of the peer's virtual environment."""
        return str(self.home / "venv" / "bin" / program)

    def make_venv(self, *requirements: str) -> None:
        """pip sees all requirements at once: a pinned torch must not be replaced by a later one."""
        if not Path(self.bin("python")).exists():
            run([sys.executable, "-m", "venv", "--without-pip", str(self.home / "venv")])
        run([*PIP, "--python", self.bin("python"), "install", "--quiet", *requirements])

    def leave_out(self, *packages: str) -> None:
        """Removes what pip took for a dependency and what does no good here."""
        run([*PIP, "--python", self.bin("python"), "uninstall", "--quiet", "--yes", *packages])


OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
"""No peer may ask the network for anything while it is measured."""


def run(command: Sequence[str], folder: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
    """Runs it with its output shown. Raises PeerError."""
    print("$", shlex.join(command), flush=True)
    try:
        subprocess.run(command, cwd=folder, env={**os.environ, **(environment or {})}, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"{error}; repeat the command to see why, then install again: what is done is kept") from None
