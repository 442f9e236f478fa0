"""`tokenyard status` and `tokenyard why`: the state of a running server, and the decisions about one request.

Asks the scheduler over its own socket, so that every user who may open the run directory may ask, and the HTTP side
need not answer. Processes come from the kernel; the causes of their deaths are in the file that the supervisor keeps.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import zmq

from deploy.run_directory import living_run_directories, places_to_look
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
    # Seconds since the last heartbeat, where one is overdue.
    seconds_silent: float = 0.0
    # Hangs of processes in this one's place, before it.
    hangs: int = 0


@dataclass(frozen=True)
class _Report:
    """All known facts of one server."""

    directory: Path
    model: str
    devices: str
    processes: list[_Process]
    deaths: list[str]
    scheduler: InquiryAnswer | None


def status(run_directory: Path | None, as_json: bool = False) -> int:
    """Print every server of this user, or the one of `run_directory`; 1 when a scheduler does not answer."""
    reports = [_report(directory) for directory in _directories(run_directory)]
    if as_json:
        print(json.dumps([_plain(report) for report in reports], indent=2))
    else:
        for report in reports:
            _show(report)
    return 0 if all(report.scheduler is not None for report in reports) else 1


def why(run_directory: Path | None, request_id: str) -> int:
    """Print the decision log of the requests whose id begins so; 1 when there is none."""
    lines: list[str] = []
    for directory in _directories(run_directory):
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
    """Ask the scheduler; None when it does not answer."""
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


def _directories(given: Path | None) -> list[RunDirectory]:
    if given is not None:
        if not RunDirectory(given).settings_file.is_file():
            raise SettingsError(f"run-dir {str(given)!r} is no run directory of a server: it has no settings.json")
        return [RunDirectory(given), *RunDirectory(given).of_further_models()]
    places = places_to_look()
    found = living_run_directories(places)
    if not found:
        where = ", ".join(map(str, places))
        raise SettingsError(
            f"no server that you may ask runs: looked in {where}; start one with `tokenyard serve`, be its user or "
            f"root, or give its --run-dir"
        )
    return [place for directory in found for place in (directory, *directory.of_further_models())]


def _report(directory: RunDirectory) -> _Report:
    settings = json.loads(directory.settings_file.read_text())
    # The supervisor writes about the processes of further models into the server's own directory.
    above = RunDirectory(directory.path.parent)
    further = above.settings_file.is_file()
    home = above if further else directory
    infix = f":{settings['served_model_name']}" if further else ""
    states = process_table.read(home.processes_file)
    return _Report(
        directory.path,
        settings["served_model_name"] or settings["model"],
        settings["devices"],
        [_noted(process, states.get(_name_of(process.role, infix))) for process in _processes(directory.path)],
        _tail(home.deaths_file),
        ask(directory, ""),
    )


def _name_of(role: str, infix: str) -> str:
    """Return the supervisor's name for a process of a model."""
    kind, colon, index = role.partition(" ")[0].partition(":")
    return f"{kind}{infix}{colon}{index}"


def _noted(process: _Process, state: ProcessState | None) -> _Process:
    if state is None:
        return process
    return replace(process, seconds_silent=state.seconds_silent, hangs=state.hangs)


def _plain(report: _Report) -> dict[str, Any]:
    """Convert a report for `--json`: names of fields as in the types, times in seconds, memory in bytes."""
    answer = report.scheduler
    return {
        "run_directory": str(report.directory),
        "model": report.model,
        "devices": report.devices,
        "processes": [asdict(process) for process in report.processes],
        "deaths": report.deaths,
        "scheduler": None if answer is None else asdict(answer.status),
        "incidents": [] if answer is None else answer.lines,
    }


def _show(report: _Report) -> None:
    print(f"{report.model} on {report.devices}  ({report.directory})")
    print(f"  {'process':24} {'pid':>7} {'epoch':>5} {'up':>9} {'memory':>8} {'cpu':>8}")
    for process in report.processes:
        print(
            f"  {process.role:24} {process.pid:7} {process.epoch:>5} {_duration(process.seconds):>9} "
            f"{process.resident / 2**20:5.0f} MB {process.cpu_seconds:6.1f} s"
            f"{_remarks(process)}"
        )
    if report.scheduler is None:
        print("  the scheduler does not answer: it is being restarted, or stuck")
    else:
        _show_scheduler(report.scheduler)
    deaths = [f"  {line}" for line in report.deaths]
    print("  last deaths of processes:" if deaths else "  no process has died", *deaths, sep="\n  ")


def _remarks(process: _Process) -> str:
    """Return the supervisor's complaints about a process."""
    silent = f"  SILENT for {process.seconds_silent:.0f} s" if process.seconds_silent else ""
    return silent + (f"  hung {process.hangs} times before" if process.hangs else "")


def _show_scheduler(answer: InquiryAnswer) -> None:
    state = answer.status
    print(f"  {'ready' if state.ready else 'not ready: ' + state.reason}; {state.running} run, {state.waiting} wait")
    for worker in state.workers:
        print(f"  worker {worker.index}: {_worker(worker)}")
    counters = ", ".join(f"{count} {name}" for name, count in state.counters.items() if count and "<=" not in name)
    print(f"  since its start: {counters or 'nothing'}")
    if answer.lines:
        print("  last incidents:", *(f"  {line}" for line in answer.lines[-10:]), sep="\n  ")


def _worker(worker: WorkerStatus) -> str:
    text = f"{worker.device} ({worker.backend}), epoch {worker.epoch}, {worker.running} running, step {worker.steps}"
    blocks = f"{worker.blocks_used} of {worker.blocks_total} blocks used, {worker.blocks_cached} cached"
    # A worker that computes texts in one pass has no blocks.
    has = blocks if worker.blocks_total else f"tasks: {', '.join(worker.tasks)}"
    late = f", its step has taken {worker.seconds_since_step:.1f} s" if worker.seconds_since_step > 1 else ""
    return f"{text}, {has}{late}"


def _processes(path: Path) -> list[_Process]:
    """Find the processes whose command line names the run directory, and their parent."""
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
    """Read /proc/PID/stat (proc(5)): fields 14, 15, 22 and 24, counted from the third one, after the name."""
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
