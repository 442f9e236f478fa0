"""`tokenyard status` and `tokenyard why`: what a running server does, and what was decided about one request.

Asks the scheduler over its own socket, so whoever may open the run directory may ask, and the HTTP side need not
answer. Processes are what the kernel says they are; why they died is in the file that the supervisor keeps.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from deploy.run_directory import living_run_directories
from interfaces import Inquiry, InquiryAnswer, WireError, WorkerStatus, decode, encode
from shared import process_table
from shared.endpoints import RunDirectory
from shared.process_table import ProcessState
from shared.settings import SettingsError
from shared.sockets import connect_dealer

_SECONDS_TO_ANSWER = 3.0


@dataclass(frozen=True)
class _Process:
    pid: int
    role: str
    epoch: str
    seconds: float
    resident: int
    cpu_seconds: float


def status(parent: Path, run_directory: Path | None) -> int:
    """Prints every server of this user, or the one of `run_directory`; 1 when a scheduler does not answer."""
    answers = [_show(directory) for directory in _directories(parent, run_directory)]
    return 0 if all(answers) else 1


def why(parent: Path, run_directory: Path | None, request_id: str) -> int:
    """Prints the decision log of the requests whose id begins so; 1 when nobody knows one."""
    lines: list[str] = []
    for directory in _directories(parent, run_directory):
        answer = ask(directory, request_id)
        if answer is None:
            print(f"tokenyard: the scheduler of {directory.path} does not answer", file=sys.stderr)
        else:
            lines += answer.lines
    print(
        "\n".join(lines)
        if lines
        else f"no request {request_id!r} is known; the log reaches back some thousand requests"
    )
    return 0 if lines else 1


def ask(directory: RunDirectory, request_id: str) -> InquiryAnswer | None:
    """What the scheduler knows; None when it does not answer."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = connect_dealer(
            context, directory.api_endpoint, f"inquiry-{os.getpid()}-{time.monotonic_ns()}".encode()
        )
        socket.send(encode(Inquiry(request_id)))
        deadline = time.monotonic() + _SECONDS_TO_ANSWER
        while socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            message = decode(socket.recv())
            if isinstance(message, InquiryAnswer):
                return message
    except WireError:
        return None
    finally:
        context.destroy(linger=0)
    return None


def _directories(parent: Path, given: Path | None) -> list[RunDirectory]:
    found = [RunDirectory(given)] if given is not None else living_run_directories(parent)
    if not found:
        raise SettingsError(f"no server of yours runs in {parent}; start one with `tokenyard serve`, or give --run-dir")
    return found


def _show(directory: RunDirectory) -> bool:
    settings = json.loads(directory.settings_file.read_text())
    print(f"{settings['served_model_name'] or settings['model']} on {settings['devices']}  ({directory.path})")
    print(f"  {'process':24} {'pid':>7} {'epoch':>5} {'up':>9} {'memory':>8} {'cpu':>8}")
    states = process_table.read(directory.processes_file)
    for process in _processes(directory.path):
        print(
            f"  {process.role:24} {process.pid:7} {process.epoch:>5} {_duration(process.seconds):>9} "
            f"{process.resident / 2**20:5.0f} MB {process.cpu_seconds:6.1f} s"
            f"{_remarks(states.get(process.role.partition(' ')[0]))}"
        )
    answer = ask(directory, "")
    if answer is None:
        print("  the scheduler does not answer: it is being restarted, or stuck")
    else:
        _show_scheduler(answer)
    deaths = [f"  {line}" for line in _tail(directory.deaths_file)]
    print("  last deaths of processes:" if deaths else "  no process has died", *deaths, sep="\n  ")
    return answer is not None


def _remarks(state: ProcessState | None) -> str:
    """What the supervisor has against a process."""
    if state is None:
        return ""
    silent = f"  SILENT for {state.seconds_silent:.0f} s" if state.seconds_silent else ""
    return silent + (f"  hung {state.hangs} times before" if state.hangs else "")


def _show_scheduler(answer: InquiryAnswer) -> None:
    state = answer.status
    print(f"  {'ready' if state.ready else 'not ready: ' + state.reason}; {state.running} run, {state.waiting} wait")
    for worker in state.workers:
        print(f"  worker {worker.index}: {_worker(worker)}")
    counters = ", ".join(f"{count} {name}" for name, count in state.counters.items() if count)
    print(f"  since its start: {counters or 'nothing'}")
    if answer.lines:
        print("  last incidents:", *(f"  {line}" for line in answer.lines[-10:]), sep="\n  ")


def _worker(worker: WorkerStatus) -> str:
    text = f"{worker.device}, epoch {worker.epoch}, {worker.running} running, step {worker.steps}"
    blocks = f"{worker.blocks_used} of {worker.blocks_total} blocks used, {worker.blocks_cached} cached"
    late = f", its step has taken {worker.seconds_since_step:.1f} s" if worker.seconds_since_step > 1 else ""
    return f"{text}, {blocks}{late}"


def _processes(path: Path) -> list[_Process]:
    """Those whose command line names the run directory, and their parent."""
    wanted = re.compile(rf"tokenyard: (.+?) \[.*--run-dir {re.escape(str(path))}(?: .*?)?(?:--epoch (\d+))?[ \]]*$")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            match = wanted.match(_title(entry))
            if match:
                found.append(_process(entry, match[1], match[2] or ""))
    return sorted((process for process in found if process is not None), key=lambda process: process.role)


def _title(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").rstrip()
    except OSError:
        return ""


def _process(entry: Path, role: str, epoch: str) -> _Process | None:
    """From /proc/PID/stat (proc(5)): fields 14, 15, 22 and 24, counted from the third one, after the name."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return _Process(
        int(entry.name),
        role,
        epoch,
        uptime - int(fields[19]) / ticks,
        int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        (int(fields[11]) + int(fields[12])) / ticks,
    )


def _tail(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()[-10:]
    except OSError:
        return []


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s"
