"""`python -m benchmarks.gpu_sanitized CASE DEVICE`: one tiny kernel case, for compute-sanitizer to watch.

`watched` runs all cases so, where the program is there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import gpu_repeats
from benchmarks.gpu_products import four_bits
from model_worker.adapters import slots
from model_worker.cuda import grouped_trial

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck")
DRAWN_WIDTH = 2000
_MOST_SECONDS = 300
# What the program ends with when it has found something.
_FOUND = 9


def _attention(device: torch.device) -> str:
    # It knows transformers' models, too, which the other cases need not wait for.
    from benchmarks import gpu_checks

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case = gpu_checks.AttentionCase(str(device), dtype, 64, 64, 16, True, ("mixed rows",))
    return ", ".join(f"{name} by {error:.2g}" for name, error, wrong in gpu_checks.attention_case(case) if wrong)


def _four_bits(device: torch.device) -> str:
    # In pieces, which count themselves.
    linear = four_bits(66, 1024, 128, torch.device("cpu"))
    return grouped_trial.unsupported(linear, device, torch.float16, (1,) if device.type == "cpu" else (1, 17))


def _adapters(device: torch.device) -> str:
    return slots.unsupported(device, torch.float32 if device.type == "cpu" else torch.bfloat16)


def _draw(device: torch.device) -> str:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    ours, torchs = (gpu_repeats.draw(device, dtype, DRAWN_WIDTH, by_kernels)().cpu() for by_kernels in (True, False))
    tokens = slice(0, 2 * gpu_repeats.ROWS)
    return "" if torch.equal(ours[tokens], torchs[tokens]) else "the kernels draw other tokens"


CASES: dict[str, Callable[[torch.device], str]] = {
    "attention": _attention,
    "four-bits": _four_bits,
    "adapters": _adapters,
    "draw": _draw,
}


def watched(device: torch.device) -> dict[str, Any]:
    """Run all cases under each tool of the program."""
    program = shutil.which(PROGRAM)
    if program is None:
        return {"skipped": f"{PROGRAM} is not on the path"}
    found: dict[str, Any] = {}
    for tool in TOOLS:
        for case in CASES:
            options = ["--tool", tool, "--error-exitcode", str(_FOUND)]
            command = [program, *options, sys.executable, "-m", "benchmarks.gpu_sanitized", case, str(device)]
            found[f"{case}, {tool}"] = _ran(command)
    return {**found, "wrong": [f"{name}: {said}" for name, said in found.items() if said != "clean"]}


def _ran(command: list[str]) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"not ended after {_MOST_SECONDS} s"
    lines = (ran.stdout + ran.stderr).strip().splitlines()
    return "clean" if ran.returncode == 0 else f"ended with {ran.returncode}: {lines[-1] if lines else 'nothing said'}"


def main(arguments: list[str]) -> int:
    case, device = arguments
    with torch.no_grad():
        wrong = CASES[case](torch.device(device))
    if wrong:
        print(f"{case}: {wrong}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
