"""Facts about the machine, found without torch: GPUs, processor, cache folders, ports."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path


def torch_version() -> str:
    """Return the version of the installed torch, with its build (`2.13.0+cpu`); empty when there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def cuda_devices(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return `cuda:0`, `cuda:1`... as a worker will number them; none when torch is a CPU build."""
    if torch_version().endswith("+cpu"):
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    count = _gpus_installed() if visible is None else _gpus_listed(visible)
    return [f"cuda:{index}" for index in range(count)]


def _gpus_installed() -> int:
    nodes = [node for node in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", node.name)]
    return len(nodes) or _gpus_of_driver()


def _gpus_of_driver() -> int:
    """Count GPUs with the driver's tool, for systems without device nodes (WSL)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _gpus_listed(visible: str) -> int:
    """Count the GPUs of CUDA_VISIBLE_DEVICES: CUDA reads the list up to the first entry that names no device."""
    count = 0
    for entry in visible.split(","):
        if not re.fullmatch(r"[0-9]+|GPU-.+|MIG-.+", entry.strip()):
            break
        count += 1
    return min(count, _gpus_installed()) if re.fullmatch(r"[0-9, ]+", visible) else count


def cpu_features() -> frozenset[str]:
    """Return the instruction set flags of the first core (`flags` on x86, `Features` on ARM)."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def is_writable(directory: Path) -> bool:
    """Whether files can be made in `directory`, which is made when it is missing."""
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        return os.access(directory, os.W_OK | os.X_OK)
    return False
