"""The hour on a GPU: everything about its workers that can only be known there, in one command and two files.

Each part is a function that returns figures; one that fails is written down with its error, and the others go on. The
files are `gpu.json` and `gpu.md` in the folder of `--out`. With `pretend` all of it runs on a CPU in seconds.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import gpu, gpu_checks, gpu_costs, gpu_host, gpu_products, gpu_repeats, gpu_sanitized, gpu_server
from interfaces import StepResult
from model_worker.attention import cuda, triton
from model_worker.cuda.memory import CudaMemory
from model_worker.execution.rehearsal import gpu_kv_memory
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.sampling import draw_proof
from model_worker.sampling.sampler import SamplerRows

Figures = dict[str, Any]


@dataclass
class Hour:
    """What the parts share: the device, the model, and their sizes."""

    device: torch.device
    model: Path
    dtype: str
    pretend: bool

    @cached_property
    def loaded(self) -> LoadedModel:
        return load_model(self.model, self.dtype, str(self.device), lambda *_: None)

    def size(self, real: int, pretended: int) -> int:
        return pretended if self.pretend else real

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Return the median time of a call that the device has ended."""
        found = []
        for _ in range(times):
            self._wait()
            began = time.perf_counter()
            work()
            self._wait()
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def machine(hour: Hour) -> Figures:
    """Versions, and what the card reaches in a copy and in a matrix product."""
    side = hour.size(8192, 64)
    values = torch.randn(side, side, device=hour.device).to(torch.bfloat16)
    other = values.clone()
    copied = hour.seconds(lambda: other.copy_(values), 10)
    multiplied = hour.seconds(lambda: values @ values, 10)
    on_gpu = hour.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(hour.device) if on_gpu else "cpu, pretended",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(hour.device))) if on_gpu else "none",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "torch's attention over blocks": cuda.unsupported_version() or "there",
        "copy GB/s": round(2 * values.nbytes / copied / 1e9, 1),
        "bf16 TFLOP/s": round(2 * side**3 / multiplied / 1e12, 2),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def attention(hour: Hour) -> Figures:
    """The attention kernel against plain torch: blocks, windows, caps, sinks, heads, decode rows and prompts."""
    if (reason := triton.missing()) is not None:
        return {"skipped": reason}
    dtype = torch.float32 if hour.pretend else torch.bfloat16
    kinds = ("mixed rows",) if hour.pretend else ("decode rows", "prompts", "mixed rows")
    sizes = [(64, 64), (576, 512)]
    if not hour.pretend:
        sizes = [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512)]
    pages = {(128, 128): (16, 32, 256)}
    cases = [
        gpu_checks.AttentionCase(str(hour.device), dtype, *heads, page, rich, kinds)
        for heads in sizes
        for page in pages.get(heads, (16,))
        for rich in (False, True)
    ]
    found = [
        one for case in gpu_checks.side_by_side(gpu_checks.attention_case, cases, not hour.pretend) for one in case
    ]
    wrong = [f"{name}: {error:.2g}" for name, error, bad in found if bad]
    return {"cases": len(found), "largest error": max(error for _, error, _ in found), "wrong": wrong}


def architectures(hour: Hour) -> Figures:
    """Tiny models of many families: what attends, what is recorded, and tokens as transformers' in float32 on a CPU."""
    from tests.model_worker import tiny_models

    names = ("llama", "gemma2") if hour.pretend else tiny_models.ARCHITECTURES
    with tempfile.TemporaryDirectory() as folder:
        # Wide enough that a kernel's smallest sides are no padding.
        cases = [
            gpu_checks.ModelCase(name, tiny_models.own_tiny_model(name, Path(folder) / name), str(hour.device))
            for name in names
        ]
        found = gpu_checks.side_by_side(gpu_checks.model_case, cases, not hour.pretend)
    wrong = [
        one["model"]
        for one in found
        if "failed" in one or one["greedy as transformers"] < 1 or not one["recorded bits equal"]
    ]
    table = {one["model"]: json.dumps({name: one[name] for name in one if name != "model"}) for one in found}
    return {**table, "wrong": wrong}


def sanitizer(hour: Hour) -> Figures:
    """What compute-sanitizer finds in tiny cases of four kernels: accesses beyond memory, and races."""
    if (reason := triton.missing()) is not None:
        return {"skipped": reason}
    return gpu_sanitized.watched(hour.device)


def repeated(hour: Hour) -> Figures:
    """The same launches many times in one process, bit by bit: products in pieces, adapters and the draw."""
    if (reason := triton.missing()) is not None:
        return {"skipped": reason}
    dtype = torch.float32 if hour.pretend else torch.bfloat16
    tokens = (1,) if hour.pretend else (1, 17, 64)
    repeats = hour.size(gpu_repeats.REPEATS, 2)
    with torch.inference_mode():
        sizes = hour.size(4096, 1024), hour.size(151_936, 300)
        cases = gpu_repeats.launches(hour.device, dtype, *sizes, tokens)
        wrong = gpu_repeats.unequal(cases, repeats)
    return {"launches of each": repeats, "cases": len(cases), "wrong": wrong}


def products(hour: Hour) -> Figures:
    """Products with weights in four bits and in FP8, of experts too, and of adapters, against float32; and times."""
    if (reason := triton.missing()) is not None:
        return {"skipped": reason}
    dtype = torch.float32 if hour.pretend else torch.bfloat16
    few = hour.size(1024, 128), hour.size(2048, 256)
    many = hour.size(4096, 128), hour.size(4096, 256)
    counts = (1,) if hour.pretend else (1, 16, 64, 1024)
    checked = gpu_products.checked(hour.device, dtype, *few)
    return {**checked, **gpu_products.timed(hour.device, dtype, *many, counts, hour.seconds)}


def drawing(hour: Hour) -> Figures:
    """Whether the draw's kernels draw torch's tokens, and the time of both."""
    if (reason := triton.missing()) is not None:
        return {"skipped": reason}
    width = hour.size(151_936, 600)
    plain, other = (SamplerRows(draw_proof.ROWS, width, hour.device, counts_there=True) for _ in range(2))
    alike = draw_proof.proven(hour.device, plain, other, getattr(torch, hour.dtype)) is not None
    return {"draws torch's tokens": alike, "vocabulary": width}


def logits(hour: Hour) -> Figures:
    """The model's logits by the reference attention and by the device's own, against float32."""
    checks = gpu.checks(hour.model, str(hour.device), hour.dtype)
    found: Figures = {f"error of {check.name}": check.error for check in checks}
    return {**found, "wrong": [checks[1].name] if gpu.disagree(*checks) else []}


def throughput(hour: Hour) -> Figures:
    """Output tokens a second, greedy and drawn."""
    found: Figures = {}
    for rows in (1, 2) if hour.pretend else (1, 64, 256):
        for kind, sampled in (("greedy", False), ("drawn", True)):
            gc.collect()
            speed = gpu.Worker(hour.loaded, rows, hour.size(128, 20), hour.size(256, 5)).measure(sampled)
            found[f"{kind} tok/s, {rows} rows"] = round(speed.tokens / speed.seconds, 1)
            found[f"{kind} device idle, {rows} rows"] = round(max(0.0, 1 - speed.busy / speed.seconds), 3)
    return found


def profile(hour: Hour) -> Figures:
    """Kernels of a decode step, and the host's time to launch it."""
    found: Figures = {}
    for rows in (2,) if hour.pretend else (1, 64, 256):
        gc.collect()
        for name, value in gpu_costs.step_profile(hour.loaded, rows, hour.size(20, 3), rows == 64).items():
            found[f"{rows} rows: {name}"] = value
    return found


def host(hour: Hour) -> Figures:
    """The host's time for a decode step whose kernels are replaced by nothing; a driver's launches are not in it."""
    if (reason := triton.missing()) is not None:
        return {"skipped": reason}
    return gpu_host.host_costs(256, hour.size(200, 20))


def draw_costs(hour: Hour) -> Figures:
    """Microseconds of a draw."""
    if (reason := triton.missing()) is not None:
        return {"skipped": reason}
    found: Figures = {}
    for rows in (1,) if hour.pretend else (1, 64, 256):
        found |= gpu_costs.draw_costs(hour.device, hour.size(151_936, 600), rows, hour.seconds)
    return found


def mixed_steps(hour: Hour) -> Figures:
    """A prompt in every other step, beside rows in decode."""
    rows, prompt = hour.size(64, 2), hour.size(512, 20)
    gc.collect()
    worker = gpu.Worker(hour.loaded, rows + 1, prompt, hour.size(64, 8))
    worker.begin(worker.joining(range(rows), gpu.wishes(False))).result()
    decoding = np.arange(rows, dtype=np.int32)
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(hour.size(40, 6)):
        fields: dict[str, Any] = {"rows": decoding}
        if i % 2:
            fields = worker.joining(range(rows, rows + 1), gpu.wishes(False))
            fields["rows"] = np.arange(rows + 1, dtype=np.int32)
            fields["ntok"] = np.array([*[1] * rows, prompt], np.int32)
            fields["drop"] = np.array([rows] if i > 1 else [], np.int32)
        began = time.perf_counter()
        worker.begin(fields).result()
        times[i % 2 == 1].append(time.perf_counter() - began)
    decode, mixed = (1000 * statistics.median(times[kind]) for kind in (False, True))
    return {"decode step ms": round(decode, 3), "mixed step ms": round(mixed, 3), "ratio": round(mixed / decode, 2)}


def long_context(hour: Hour) -> Figures:
    """One row with a long context: time of a decode step, and the rate at which K and V are read if that is all."""
    prompt = hour.size(32_000, 200)
    gc.collect()
    speed = gpu.Worker(hour.loaded, 1, prompt, hour.size(64, 5)).measure(False)
    step = speed.seconds / max(1, speed.tokens)
    read = hour.loaded.attention.layout.bytes_per_token * prompt
    return {"tokens": prompt, "decode step ms": round(1000 * step, 3), "K/V GB/s at least": round(read / step / 1e9, 1)}


def memory(hour: Hour) -> Figures:
    """What a worker with the usual limits plans for weights, steps and K/V."""
    if hour.device.type != "cuda":
        return {"skipped": "a CPU has no such memory"}
    gc.collect()
    plan = gpu_kv_memory(hour.loaded, CudaMemory(hour.device), 1, 2048, 256, None)
    return {**vars(plan), "kv_cache": plan.kv_cache}


def faults(hour: Hour) -> Figures:
    """A step for which there is no memory: computed in parts, with the tokens of the whole."""
    rows, prompt = hour.size(128, 3), hour.size(512, 20)
    tokens, seconds, held = [], [], []
    for short in (False, True):
        gc.collect()
        worker = gpu.Worker(hour.loaded, rows, prompt, 8)
        if short:
            held.append(_without_memory(hour, worker, rows * prompt // 3))
        began = time.perf_counter()
        result: StepResult = worker.begin(worker.joining(range(rows), gpu.wishes(True))).result()
        seconds.append(round(time.perf_counter() - began, 3))
        tokens.append(result.tokens)
    # The next part may start processes, which find no memory in this one's cache.
    held.clear()
    if hour.device.type == "cuda":
        torch.cuda.empty_cache()
    same = float((tokens[0] == tokens[1]).mean())
    # Of other shapes, a GPU's matrix products round otherwise.
    wrong = ["tokens"] if same < (1.0 if hour.pretend else 0.9) else []
    return {"rows": rows, "the same tokens in parts": same, "seconds, whole and in parts": seconds, "wrong": wrong}


def _without_memory(hour: Hour, worker: gpu.Worker, room: int) -> torch.Tensor | None:
    """Leave the GPU a gigabyte; on a CPU, pretend that passes of more than `room` tokens find no memory."""
    if hour.device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(hour.device)[0]
        return torch.empty(free - (1 << 30), dtype=torch.uint8, device=hour.device)
    forward = worker.backend.logits

    def logits_of(batch: Any) -> torch.Tensor:
        if batch.num_tokens > room:
            raise torch.OutOfMemoryError("CUDA out of memory: pretended")
        result: torch.Tensor = forward(batch)
        return result

    worker.backend.logits = logits_of
    return None


def served(hour: Hour) -> Figures:
    """A whole server: prompts of 512 tokens and answers of 128 at three loads, and a worker killed under streams."""
    if hour.pretend:
        return {"skipped": "`tokenyard bench` measures servers on a CPU"}
    with tempfile.TemporaryDirectory() as folder:
        return gpu_server.served(hour.model, f"cuda:{hour.device.index or 0}", (1, 64, 256), 512, 128, Path(folder))


def transformers_batching(hour: Hour) -> Figures:
    """The only peer that is there: transformers' continuous batching, with as many rows as we serve."""
    if hour.pretend:
        return {"skipped": "it wants a GPU"}
    return gpu_server.transformers_batching(hour.model, hour.device, 256, 512, 128)


PARTS: tuple[Callable[[Hour], Figures], ...] = (
    machine,
    attention,
    sanitizer,
    repeated,
    products,
    drawing,
    logits,
    architectures,
    throughput,
    profile,
    host,
    draw_costs,
    mixed_steps,
    long_context,
    memory,
    faults,
    served,
    transformers_batching,
)


def run(
    device: torch.device, model: Path | None, dtype: str, pretend: bool, out: Path, only: Sequence[str] = ()
) -> int:
    """Run all parts, or `only` those of some names, and write the files. Returns 1 if something is wrong, else 0.

    `gpu.jsonl` has a line for each part as soon as it has ended.
    """
    unknown = set(only) - {part.__name__ for part in PARTS}
    if unknown:
        raise ValueError(f"there is no part {', '.join(sorted(unknown))}: {', '.join(p.__name__ for p in PARTS)}")
    if pretend:
        # Asked for when triton is first imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    results: dict[str, Figures] = {}
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if model is None:
            positions = 512 if pretend else 40_960
            model = gpu.random_model(Path(folder) / "model", "tiny" if pretend else "0.6b", positions)
        hour = Hour(device, model, dtype, pretend)
        for part in PARTS:
            if only and part.__name__ not in only:
                continue
            began = time.perf_counter()
            try:
                figures = part(hour)
            except Exception as error:  # the next part may work
                figures = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            results[part.__name__] = {**figures, "seconds": round(time.perf_counter() - began, 1)}
            print(f"{part.__name__}: {json.dumps({k: v for k, v in figures.items() if k != 'traceback'})}", flush=True)
            with (out / "gpu.jsonl").open("a") as lines:
                lines.write(json.dumps({part.__name__: results[part.__name__]}) + "\n")
    (out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "gpu.md").write_text(page(results, pretend))
    return int(any("failed" in figures or figures.get("wrong") for figures in results.values()))


def page(results: dict[str, Figures], pretend: bool) -> str:
    """Make a page of Markdown with a table for each part."""
    lines = ["# GPU workers", ""]
    if pretend:
        lines += ["**Pretended on a CPU: these figures mean nothing.**", ""]
    for name, figures in results.items():
        about = next(part.__doc__ or "" for part in PARTS if part.__name__ == name)
        lines += [f"## {name.replace('_', ' ')}", "", about, "", "| what | value |", "|---|---|"]
        lines += [f"| {what} | {_cell(value)} |" for what, value in figures.items() if what != "traceback"]
        lines.append("")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "nothing"
    return str(value).replace("|", "\\|").replace("\n", " ")
