"""The servers of a comparison: ours, peers, or any at a URL; started for a model, and still while others are measured.

Knows processes and readiness. It does not know the work, nor what is measured.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import server
from benchmarks.encoder_words import AROUND, words
from benchmarks.peers.peer import Peer, Start
from benchmarks.processes import CpuTimes, freeze, thaw
from benchmarks.standard_work import REQUEST_TIMEOUT_S, WORD_IDS, Needs
from deploy.bench.client import Client, Form
from deploy.bench.workload import PlannedRequest

OURS = "ours"
POLL_S = 0.25
FIRST_ANSWER_S = 120.0
SETTLE_S = 0.5
QUIET_S, QUIET_LIMIT_S = 0.4, 15.0
QUIET_CORES = 0.5
"""Above what any peer burns doing nothing, below what it takes to decode."""


@dataclass
class Contender:
    """A server that has given its first answer; `pid` is None where its processes are out of sight.

    A peer is stopped with SIGSTOP while it waits for its turn: some burn a tenth of a core doing nothing. Ours stays as
    it is: its processes watch each other by the clock, and its idle time is part of what every report shows.
    """

    name: str
    client: Client
    command: list[str] | None
    pid: int | None = None
    start_s: float | None = None
    freezes: bool = False

    async def step_back(self) -> None:
        """Waits for the end of what the last cell has left, so that it is not in the next."""
        if self.pid is None:
            return
        if not await self._is_quiet():
            trouble = f"{self.name} still works {QUIET_LIMIT_S:.0f} s after its cell, on requests whose client is gone"
            print(trouble, file=sys.stderr)
        if self.freezes:
            freeze(self.pid)

    async def _is_quiet(self) -> bool:
        """Within the limit; by CPU time, because that is what it would take from the others."""
        deadline = time.monotonic() + QUIET_LIMIT_S
        while time.monotonic() < deadline:
            before = self.cpu_s()
            await asyncio.sleep(QUIET_S)
            if self.cpu_s() - before < QUIET_CORES * QUIET_S:
                return True
        return False

    async def step_forward(self) -> None:
        if self.freezes and self.pid is not None:
            thaw(self.pid)
            await asyncio.sleep(SETTLE_S)

    def cpu_s(self) -> float:
        """User and system seconds of all its processes since their start."""
        if self.pid is None:
            return 0.0
        return sum(CpuTimes.of(self.pid).since(CpuTimes({})).values())


class Entrant(abc.ABC):
    """A server that can be had; `running` has it for one of the standard models."""

    name: str

    def takes(self, embeds: bool) -> bool:
        """Whether the server makes vectors, or text."""
        return True

    @abc.abstractmethod
    def running(
        self, model: Path, needs: Needs, log: Path, start_limit: float
    ) -> contextlib.AbstractAsyncContextManager[Contender]: ...


class Ours(Entrant):
    """This checkout. Under another name it is its own peer, which shows how much figures differ by chance."""

    def __init__(self, name: str, flags: Sequence[str]) -> None:
        self.name, self._flags = name, flags

    @contextlib.asynccontextmanager
    async def running(self, model: Path, needs: Needs, log: Path, start_limit: float) -> AsyncIterator[Contender]:
        port = server.free_port()
        served = ["--served-model-name", model.name]
        command = server.serve_command(port, [str(model), *served, *self._flags])
        start = Start(command, {"OMP_NUM_THREADS": str(needs.threads)})
        coded = ("coded bfloat16",) if model.suffix == ".gguf" else ()
        server.compile_kernels(("encoder float32",) if needs.embeds else ("float32", "bfloat16", *coded))
        form = _asking(Form(), needs)
        async with _started(self.name, start, port, model.name, form, log, start_limit) as contender:
            yield contender


class Installed(Entrant):
    """A peer with a start script."""

    def __init__(self, peer: Peer) -> None:
        self.name, self._peer = peer.name, peer

    def takes(self, embeds: bool) -> bool:
        return self._peer.embeds == embeds

    @contextlib.asynccontextmanager
    async def running(self, model: Path, needs: Needs, log: Path, start_limit: float) -> AsyncIterator[Contender]:
        port, own = server.free_port(), self._peer.prepared(model)
        start, name = self._peer.start(own, port, needs), self._peer.model_name(own)
        form = _asking(self._peer.form, needs)
        async with _started(self.name, start, port, name, form, log, start_limit) as contender:
            contender.freezes = True
            yield contender


class AtUrl(Entrant):
    """A server that runs already, with its own model. It is not stopped while it waits."""

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")

    @contextlib.asynccontextmanager
    async def running(self, model: Path, needs: Needs, log: Path, start_limit: float) -> AsyncIterator[Contender]:
        name = await server.model_name(self.name, None)
        client = Client(self.name, name, REQUEST_TIMEOUT_S, form=_asking(Form(), needs))
        await _first_answer(client, self.name, None, log, start_limit)
        yield Contender(self.name, client, None)


def _asking(form: Form, needs: Needs) -> Form:
    """The form, for vectors where the work is about those."""
    return replace(form, embeds=words, tokens_around=AROUND) if needs.embeds else form


@contextlib.asynccontextmanager
async def _started(
    name: str, start: Start, port: int, model_name: str, form: Form, log: Path, start_limit: float
) -> AsyncIterator[Contender]:
    began = time.monotonic()
    client = Client(f"http://127.0.0.1:{port}", model_name, REQUEST_TIMEOUT_S, form=form)
    with server.running(start.command, log, start.environment) as process:
        await _first_answer(client, name, process, log, start_limit)
        try:
            yield Contender(name, client, start.command, process.pid, time.monotonic() - began)
        finally:
            # A process that stands still does not hear SIGTERM.
            thaw(process.pid)


async def _first_answer(
    client: Client, name: str, process: subprocess.Popen[bytes] | None, log: Path, limit: float
) -> None:
    """Returns when an answer has come. The only sign of readiness that all servers share."""
    deadline = time.monotonic() + limit
    probe = [PlannedRequest([WORD_IDS[0]] * 8, 2)]
    outcome = "nothing"
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise server.ServerError(f"{name} ended with exit code {process.returncode}{server.end_of(log)}")
        (timeline,) = await client.run(probe, 1, min(FIRST_ANSWER_S, limit), lambda timeline: None)
        if timeline.completed:
            return
        outcome = timeline.outcome
        await asyncio.sleep(POLL_S)
    raise server.ServerError(
        f"{name} has not answered within {limit:g} s, but with {outcome}: "
        f"raise --start-timeout if it needs longer{server.end_of(log if process else None)}"
    )
