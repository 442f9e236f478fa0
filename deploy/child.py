"""One child process: its start, the three descriptors by which it is watched, and its end.

Knows Linux processes and pipes. Does not know why a child is started again or what its events mean: see supervisor.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.forkserver import FORKS
from shared.liveness import SUPERVISOR_PID, open_pidfd
from shared.logs import trouble_in
from shared.phases import STATUS_FD

_LINES_KEPT = 30
_LONGEST_LINE = 64 * 1024
_TELLING = re.compile(r"\b\w*(Error|Exception|Killed)\b|Fatal Python error|\b(ERROR|CRITICAL)\b|terminate called")


# The signal that retires a process whose successor serves: it finishes what it has begun, however long that takes.
# (SIGTERM means that the whole server is being stopped.)
RETIRE = signal.SIGQUIT


@dataclass(frozen=True)
class ChildSpec:
    """The command of one child, and how it is watched.

    Children whose names share the part before the colon have one role, and are stopped together.

    `counts_starts` appends `--epoch N`, N counting the starts of this child from `first_epoch`. `stop_seconds` is the
    time between SIGTERM and SIGKILL. `rolling` children are replaced on SIGHUP (rolling.py), so two of them can do the
    same work for a while. `forks`: the child is a fork server, which starts the next child (shared/forkserver.py).
    `pass_fds` are descriptors of ours that it inherits under their numbers. `rereads`: it reads keys and certificates
    again at SIGHUP. A child that has sent a heartbeat (shared/phases.py: beat) may be silent for `hang_seconds`; None:
    without limit. On request it writes its stack to `stack_file`.

    Children of one `group` work together, and none can without the others: when one dies, the supervisor ends the
    others and starts all of them again. Empty: the child stands alone. ValueError for a rolling child of a group.

    The others do their work without a child that is not `vital`: the supervisor does not wait for it, nor give up
    because it cannot be kept alive.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    counts_starts: bool = False
    first_epoch: int = 0
    stop_seconds: float = 10.0
    rolling: bool = False
    rereads: bool = False
    forks: bool = False
    hang_seconds: float | None = None
    stack_file: str = ""
    pass_fds: Sequence[int] = ()
    group: str = ""
    # The model that it serves, where a server has several: the supervisor gives up when all of a role and model are
    # hopeless.
    model: str = ""
    vital: bool = True

    def __post_init__(self) -> None:
        if self.group and self.rolling:
            raise ValueError(
                f"{self.name} is rolling and has the group {self.group!r}: a rolling child is replaced by itself, the "
                "members of a group only together; leave one of the two out"
            )

    @property
    def role(self) -> str:
        return self.name.partition(":")[0]

    @property
    def title(self) -> str:
        """The name for people: with the device, where there is one."""
        return f"{self.name} ({self.device})" if self.device else self.name


class Child:
    """A started process. Each child leads its own session, for two reasons.

    Ctrl-C at the terminal reaches the supervisor alone, which then stops the children in order; and `kill` reaches
    whatever the child has started itself. Must be created in the main thread: the kernel ties a child's death signal
    (shared/liveness.py) to the thread that forked it.
    """

    def __init__(self, spec: ChildSpec, epoch: int) -> None:
        self.spec = spec
        self.epoch = epoch
        self.started_at = self.heard_at = time.monotonic()
        self.ready_at: float | None = None
        # The process that sends heartbeats: this one or its fork. None: there was no heartbeat yet.
        self.beating: int | None = None
        # The reason why this supervisor has killed it.
        self.verdict = ""
        # The reason that it has given for leaving in order, and for being followed at once.
        self.leaving = ""
        # Why it has not come together with others.
        self.missed = ""
        self.status, write_end = os.pipe()
        # A child that writes never waits for a supervisor that does not read.
        os.set_blocking(write_end, False)
        try:
            self._process = _spawn(spec, epoch, write_end)
        except OSError:
            os.close(self.status)
            raise
        finally:
            os.close(write_end)
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        self.sentinel = open_pidfd(self._process.pid)
        os.set_blocking(self.status, False)
        os.set_blocking(self.output, False)
        self._status_lines = _LineReader(self.status)
        self._output_lines = _LineReader(self.output)
        self._last_lines: deque[str] = deque(maxlen=_LINES_KEPT)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.sentinel, self.status, self.output

    def read_output(self) -> list[str] | None:
        """Return complete lines that have arrived; None at the end of the stream."""
        lines = self._output_lines.read()
        self._last_lines.extend(line for line in lines or () if line.strip())
        return lines

    def read_events(self) -> list[dict[str, Any]] | None:
        """Return events of shared/phases.py that have arrived; None at the end of the stream."""
        lines = self._status_lines.read()
        if lines is None:
            return None
        events = [event for line in lines if (event := _event(line)) is not None]
        for event in events:
            self.heard_at = time.monotonic()
            if event.get("event") == "beat":
                self.beating = int(event["pid"])
        return events

    def fork_again(self, epoch: int) -> bool:
        """Have the fork server, whose fork has died, fork again. False when it has ended, too."""
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{epoch}\n".encode())
        except OSError:
            return False
        self.epoch = epoch
        self.ready_at = None
        self.beating = None
        self.leaving = ""
        self.missed = ""
        self.started_at = self.heard_at = time.monotonic()
        self._last_lines.clear()
        return True

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def hang_up(self) -> None:
        """Have the child read keys and certificates again. Before it is ready it would end by the signal."""
        if self.spec.rereads and self.ready_at is not None:
            os.kill(self.pid, signal.SIGHUP)

    def retire(self) -> None:
        os.kill(self.pid, RETIRE)

    def kill(self) -> None:
        """Kill the child and all processes that it has started, now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Return the exit status of the ended child (negative: the signal). All processes that it has started end with
        it.

        Nothing else waits for the child: until this call its id cannot belong to another process, so `kill` is safe.
        """
        self.kill()
        return self._process.wait()

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self.status)
        os.close(self.sentinel)

    @property
    def last_error(self) -> str:
        """Return why it was killed, else the last line that names an error, else the last that is no routine log
        line."""
        if self.verdict:
            return self.verdict
        lines = [trouble for line in self._last_lines if (trouble := trouble_in(line))]
        telling = [line for line in lines if _TELLING.search(line)]
        return (telling or lines or [""])[-1]


def describe_exit(status: int) -> str:
    """Describe an exit as `exit code 3` or `signal SIGKILL`, with the usual cause where there is one."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    return f"signal {name}" + (" (unless it was sent by hand: out of memory)" if name == "SIGKILL" else "")


class _LineReader:
    """Cuts what a non-blocking descriptor delivers into lines; an overlong line is cut as well."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._ended = False

    def read(self) -> list[str] | None:
        if self._ended:
            return None
        arrived = self._rest + self._take()
        *lines, self._rest = arrived.split(b"\n")
        if self._ended or len(self._rest) > _LONGEST_LINE:
            lines = [*lines, self._rest] if self._rest else lines
            self._rest = b""
        return [line.decode(errors="replace") for line in lines]

    def _take(self) -> bytes:
        chunks: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while sum(map(len, chunks)) < _LONGEST_LINE:
                chunks.append(os.read(self._descriptor, _LONGEST_LINE))
                if not chunks[-1]:
                    self._ended = True
                    break
        return b"".join(chunks)


def _spawn(spec: ChildSpec, epoch: int, status: int) -> subprocess.Popen[bytes]:
    argv = [*spec.argv, "--epoch", str(epoch)] if spec.counts_starts else list(spec.argv)
    env = {**os.environ, **spec.env, STATUS_FD: str(status), SUPERVISOR_PID: str(os.getpid())}
    if spec.forks:
        env[FORKS] = "1"
    return subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.PIPE if spec.forks else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        pass_fds=(status, *spec.pass_fds),
        start_new_session=True,
    )


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None
