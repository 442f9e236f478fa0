"""`python -m tests.model_worker.loading.load_memory SMALL FILE`: measures the memory of loading a model, as JSON.

What a process has when it has loaded a small model of the same kind (Python, torch, transformers, kernels) is the base.
Prints what loading FILE adds to it at most, and what is left of that when it is loaded: bytes of resident memory, pages
of mapped files included. Exit status 3 where the kernel does not let a process reset its peak.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from model_worker.host_memory import trim_heap
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def load(path: str) -> LoadedModel:
    loaded = load_model(path, "bfloat16", "cpu", lambda *_: None)
    gc.collect()
    trim_heap()
    return loaded


def main() -> None:
    small = load(sys.argv[1])
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        sys.exit(3)
    base = resident("VmRSS")
    loaded = load(sys.argv[2])
    peak = resident("VmHWM")
    assert small.stack is not None
    assert loaded.stack is not None
    print(json.dumps({"peak": peak - base, "kept": resident("VmRSS") - base, "weights": loaded.parameter_bytes}))


if __name__ == "__main__":
    main()
