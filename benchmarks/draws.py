"""`python -m benchmarks.draws`: what drawing a token costs on a CPU, by the compiled kernel and by torch.

Times rows of logits without server and model, for several kinds of truncation. Takes some seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from model_worker.sampling import draw, draw_cpu
from model_worker.sampling.draw import Choices

# Truncations by name: top_k (None: every token), top_p.
KINDS = {"none": (None, 1.0), "top_p 0.9": (None, 0.9), "top_k 40, top_p 0.9": (40, 0.9)}
ROUNDS = 15


def choices(rows: int, width: int, top_k: int | None, top_p: float) -> Choices:
    return Choices(
        greedy=np.zeros(rows, np.bool_),
        top_k=np.full(rows, top_k or width, np.int32),
        top_p=np.full(rows, top_p),
        log_min_p=np.full(rows, -np.inf, np.float32),
        keys=np.arange(rows, dtype=np.uint64),
        logprobs=np.zeros(rows, np.int8),
    )


def microseconds(action: Callable[[], object]) -> float:
    action()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draws", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49_152, 151_936])
    options = parser.parse_args()
    out = Table("logits", "rows", "truncation", "kernel, us", "torch, us", "times")
    for width in options.vocabulary:
        for rows in options.rows:
            logits = 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
            scaled = logits - logits.amax(-1, keepdim=True)
            first = scaled.argmax(-1)
            for kind, (top_k, top_p) in KINDS.items():
                asked = choices(rows, width, top_k, top_p)
                columns = tuple(vars(asked).values())
                kernel = microseconds(lambda: draw_cpu.choose(scaled.numpy(), first.numpy(), *columns))  # noqa: B023
                plain = microseconds(lambda: draw.choose_torch(scaled, first, asked))  # noqa: B023
                out.add_row(str(width), str(rows), kind, f"{kernel:.0f}", f"{plain:.0f}", f"{plain / kernel:.1f}")
    console = Console(width=100)
    console.print(f"{torch.get_num_threads()} threads; load average {os.getloadavg()[0]:.1f}")
    console.print(out)


if __name__ == "__main__":
    main()
