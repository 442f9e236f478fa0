"""Where the time of a GPU's decode steps goes: kernels of a step, the host's time for it, and the draw by its kinds."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import gpu
from interfaces import SamplingParams
from model_worker.execution.flight import Pending
from model_worker.model import LoadedModel
from model_worker.sampling.draw_triton import TritonDraw
from model_worker.sampling.sampler import SamplerRows

Figures = dict[str, Any]
# Kinds of draws, by sampling values.
DRAWS: dict[str, dict[str, Any]] = {
    "temperature alone": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 20": {"top_k": 20},
    "top-k 20, top-p 0.9": {"top_k": 20, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}
# Kernels that are named, with the most time first.
NAMED = 14


def step_profile(loaded: LoadedModel, rows: int, steps: int, sampled: bool) -> Figures:
    """Profile decode steps, two in flight: launches, kernels by time, and the host's time of `begin`."""
    worker = gpu.Worker(loaded, rows, 128, 2 * steps + 20)
    for start in range(0, rows, 64):
        worker.begin(worker.joining(range(start, min(start + 64, rows)), gpu.wishes(sampled))).result()
    index = np.arange(rows, dtype=np.int32)
    _run(worker, index, 8)
    began = time.perf_counter()
    host = _run(worker, index, steps)
    wall = 1e6 * (time.perf_counter() - began) / steps
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if loaded.device.type == "cuda":
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        _run(worker, index, steps)
        _wait(loaded.device)
    times: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for event in profile.events() or []:
        if "CUDA" in str(event.device_type) or loaded.device.type == "cpu":
            times[event.name] += float(event.time_range.elapsed_us()) / steps
            counts[event.name] += 1
    longest = sorted(times.items(), key=lambda pair: -pair[1])[:NAMED]
    return {
        "step us": round(wall),
        "host us of begin": round(host),
        "kernels of a step": round(sum(counts.values()) / steps, 1),
        "kernels us of a step": round(sum(times.values())),
        "by time": [f"{t:.1f} us, {counts[name] / steps:.1f}x {name[:70]}" for name, t in longest],
    }


def _run(worker: gpu.Worker, rows: Any, steps: int) -> float:
    """Run decode steps, two in flight. Returns the median microseconds that the host takes to launch one."""
    pending: deque[Pending] = deque()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        pending.append(worker.begin({"rows": rows}))
        times.append(1e6 * (time.perf_counter() - began))
        if len(pending) > 1:
            pending.popleft().result()
    while pending:
        pending.popleft().result()
    return statistics.median(times)


def draw_costs(device: torch.device, width: int, rows: int, timed: Callable[[Callable[[], object], int], float]) -> Any:
    """Return microseconds of a draw of each kind, by our kernels and by torch's operations."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2.5, (rows, width)).astype(np.float32)).to(device)
    held, none = np.arange(rows, dtype=np.int32), np.empty(0, np.int32)
    positions = np.zeros(rows, np.int64)
    found: Figures = {}
    for kind, wishes in DRAWS.items():
        sampler = SamplerRows(rows, width, device)
        for row in range(rows):
            sampler.join(row, SamplingParams(temperature=1.0, seed=row, **wishes), [], none, none)
        times = []
        for kernels in (TritonDraw(device, width), None):
            sampler.use_kernels(kernels)

            def draw(sampler: SamplerRows = sampler) -> object:
                return sampler.sample_ahead(logits, held, positions)

            draw()
            times.append(round(1e6 * timed(draw, 5)))
        found[f"{kind}, {rows} rows, us (kernels / torch)"] = f"{times[0]} / {times[1]}"
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
