"""`tokenyard doctor`: looks at this machine and says what would keep a server from running, or from running well."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy import machine
from deploy.listener import port_problem
from deploy.run_directory import parent_directory
from shared.kernel_cache import kernel_cache_directory
from shared.resources import core_room, memory_room, visible_cores

_OLDEST_PYTHON = (3, 11)
_GIB = 2**30
_SECONDS_FOR_TORCH = 120.0


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One row of the table; `remedy` is empty when all is well."""

    subject: str
    verdict: Verdict
    fact: str
    remedy: str = ""


def doctor(port: int) -> int:
    """Print the table. Exit status 1 when a server could not run here."""
    findings = list(examine(port))
    Console().print(_table(findings))
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def examine(port: int) -> Iterator[Finding]:
    """Yield all checks, in the order of how often they matter."""
    checks: tuple[Callable[[], Finding], ...] = (
        check_system,
        check_python,
        check_torch,
        check_cuda,
        check_cpu,
        check_cores,
        check_memory,
        check_shared_memory,
        check_open_files,
        check_kernel_cache,
        check_run_directory,
    )
    for check in checks:
        yield check()
    yield check_port(port)


def judge(subject: str, good: bool, fact: str, remedy: str, otherwise: Verdict = Verdict.WARN) -> Finding:
    """Make a finding whose remedy only shows when it is needed."""
    return Finding(subject, Verdict.OK, fact) if good else Finding(subject, otherwise, fact, remedy)


def check_system() -> Finding:
    good = sys.platform == "linux"
    return judge("system", good, platform.platform(), "use Linux 5.3 or newer, or a container", Verdict.FAIL)


def check_python() -> Finding:
    wanted = ".".join(map(str, _OLDEST_PYTHON))
    good = sys.version_info >= _OLDEST_PYTHON
    return judge("python", good, platform.python_version(), f"use Python {wanted} or newer", Verdict.FAIL)


def check_torch() -> Finding:
    installed = machine.torch_version()
    pin = torch_pin()
    good = installed != "" and installed.partition("+")[0] == (pin or installed.partition("+")[0])
    return judge("torch", good, installed or "not installed", f"pip install torch=={pin}", Verdict.FAIL)


def torch_pin() -> str:
    """Return the torch version that tokenyard asks for; empty when none is pinned."""
    try:
        requirements = importlib.metadata.requires("tokenyard") or []
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        requirements = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    pins = [match[1] for text in requirements if (match := re.match(r"torch\s*==\s*([\w.]+)", text))]
    return pins[0] if pins else ""


def check_cuda() -> Finding:
    """Check CUDA with torch itself, in a process of its own: only torch knows whether driver and build agree."""
    expected = machine.cuda_devices()
    if not expected and shutil.which("nvidia-smi") is None:
        return Finding("cuda", Verdict.OK, "no NVIDIA GPU; models run on the CPU")
    seen = _gpus_of_torch()
    fact = ", ".join(seen) if seen else "an NVIDIA GPU or driver is here, but torch sees none"
    remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES, and that torch is not the +cpu build"
    return judge("cuda", bool(seen), fact, remedy)


def _gpus_of_torch() -> list[str]:
    code = "import torch\nfor i in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(i))"
    try:
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_SECONDS_FOR_TORCH, check=False
        )
    except subprocess.TimeoutExpired:
        return []
    return run.stdout.splitlines()


def check_cpu() -> Finding:
    flags = machine.cpu_features()
    names = {
        "avx2": "AVX2",
        "avx512f": "AVX-512",
        "avx512_bf16": "AVX-512 bf16",
        "amx_tile": "AMX",
        "amx_bf16": "AMX bf16",
        "asimd": "NEON",
        "bf16": "bf16",
        "sve": "SVE",
    }
    found = [name for flag, name in names.items() if flag in flags]
    good = bool({"avx2", "asimd"} & flags)
    fact = f"{platform.machine()}: {', '.join(found) or 'no vector extensions that help'}"
    if good and not {"avx512_bf16", "amx_bf16", "bf16"} & flags:
        fact += "; without bf16 arithmetic, try --dtype float32"
    return judge("cpu", good, fact, "expect a slow server; a CPU with AVX2 or NEON is several times faster")


def check_cores() -> Finding:
    room = core_room()
    fact = f"{room.amount:.0f} usable" + (
        f" of {visible_cores()} visible (quota of {room.group})" if room.group else ""
    )
    return judge("cores", room.amount >= 2, fact, "give the server two cores or more: API and model share this one")


def check_memory() -> Finding:
    room = memory_room()
    size = room.amount / _GIB
    fact = f"{size:.1f} GiB available" + (f" (limit of {room.group})" if room.group else "")
    return judge("memory", size >= 2, fact, "free some, or raise the limit: a small model needs 2 GiB")


def check_shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not os.access(path, os.W_OK):
        return Finding("/dev/shm", Verdict.FAIL, "not writable", "mount a tmpfs there (docker: --shm-size=1g)")
    size = shutil.disk_usage(path).free / _GIB
    remedy = "images travel through it: give it 1 GiB (docker: --shm-size=1g)"
    return judge("/dev/shm", size >= 0.9, f"{size:.1f} GiB free", remedy)


def check_open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fact = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard} at most"
    good = hard == resource.RLIM_INFINITY or hard >= 4096
    return judge("open files", good, fact, "each client needs one: raise `ulimit -Hn` (systemd: LimitNOFILE=)")


def check_kernel_cache() -> Finding:
    directory = kernel_cache_directory()
    remedy = "every start compiles kernels anew: make it writable or set XDG_CACHE_HOME"
    return judge("kernel cache", machine.is_writable(directory), str(directory), remedy)


def check_run_directory() -> Finding:
    parent = parent_directory()
    good = os.access(parent, os.W_OK | os.X_OK) and len(str(parent)) <= 70
    return judge("run directory", good, str(parent), "set TMPDIR to a short, writable path", Verdict.FAIL)


def check_port(port: int) -> Finding:
    problem = port_problem("127.0.0.1", port)
    return judge("port", problem is None, f"{port} {'is free' if problem is None else 'is not'}", problem or "")


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    for finding in findings:
        verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.subject, verdict, finding.fact, finding.remedy)
    return table
