"""The hour on a GPU: everything about its workers that can only be known there, in one command and two files.

Each part is a function that returns figures; one that fails is written down with its error, and the others go on. The
files are `gpu.json` and `gpu.md` in the folder of `--out`. With `pretend` all of it runs on a CPU in seconds.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import gpu
from interfaces import StepResult
from model_worker.attention import attention_backend, cuda, reference, triton
from model_worker.cuda.memory import CudaMemory
from model_worker.execution.rehearsal import gpu_kv_memory
from model_worker.kv_cache import AttentionParams, KVCache, KVLayout, LayerShape
from model_worker.loading.gpu_attention import TOLERANCE, batches, random_values, relative_error
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.sampling import draw_triton

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
    attend = attention_backend("triton", hour.device)
    dtype = torch.float32 if hour.pretend else torch.bfloat16
    heads = (
        [(64, 64), (576, 512)] if hour.pretend else [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512)]
    )
    pages = [16] if hour.pretend else [16, 32, 256]
    wrong = []
    errors = []
    for k_dim, v_dim in heads:
        for page in pages:
            for window, softcap, sinks in ((None, None, False), (40, 20.0, True)):
                groups = 16 if k_dim > 256 else 4
                shape = LayerShape(1 if k_dim > 256 else 2, k_dim, v_dim)
                sink = random_values((shape.kv_heads * groups,), hour.device) if sinks else None
                params = AttentionParams(k_dim**-0.5, window, softcap, sink)
                longest = -(-(triton.PIECE + 3) // page)
                cache = KVCache(KVLayout((shape,), dtype), 8 * longest, page, hour.device)
                for blocks in (cache.k[0], cache.v[0]):
                    blocks.copy_(random_values(blocks.shape, hour.device))
                for kind, batch in batches(page, cache.num_blocks, hour.device):
                    if hour.pretend and kind != "mixed rows":
                        continue
                    q = random_values((batch.num_tokens, shape.kv_heads * groups, k_dim), hour.device).to(dtype)
                    got = attend(q, cache.k[0], cache.v[0], batch, params)
                    error = relative_error(got, reference.attend(q, cache.k[0], cache.v[0], batch, params))
                    errors.append(error)
                    if not error < TOLERANCE[dtype]:
                        wrong.append(f"{kind}, heads {k_dim}/{v_dim}, page {page}, window {window}: {error:.2g}")
    return {"cases": len(errors), "largest error": max(errors), "wrong": wrong}


def drawing(hour: Hour) -> Figures:
    """Whether the draw's kernels draw torch's tokens, and the time of both."""
    if (reason := triton.missing()) is not None:
        return {"skipped": reason}
    width = hour.size(151_936, 600)
    chosen = draw_triton.proven(hour.device, width)
    return {"draws torch's tokens": chosen is draw_triton.draw, "vocabulary": width}


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


def mixed_steps(hour: Hour) -> Figures:
    """A prompt in every other step, beside rows in decode."""
    rows, prompt = hour.size(64, 2), hour.size(512, 20)
    gc.collect()
    worker = gpu.Worker(hour.loaded, rows + 1, prompt, hour.size(64, 8))
    worker.begin(worker.joining(range(rows), False)).result()
    decoding = np.arange(rows, dtype=np.int32)
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(hour.size(40, 6)):
        fields: dict[str, Any] = {"rows": decoding}
        if i % 2:
            fields = worker.joining(range(rows, rows + 1), False)
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
    plan = gpu_kv_memory(hour.loaded, CudaMemory(hour.device), 1, 2048, 128, None)
    return {**vars(plan), "kv_cache": plan.kv_cache}


def faults(hour: Hour) -> Figures:
    """A step for which there is no memory: computed in parts, with the tokens of the whole."""
    rows, prompt = hour.size(16, 3), hour.size(64, 20)
    tokens = []
    for room in (math.inf, rows * prompt // 3):
        gc.collect()
        worker = gpu.Worker(hour.loaded, rows, prompt, 8)
        backend = worker.backend
        forward = backend.logits

        def logits_of(batch: Any, room: float = room, forward: Any = forward) -> torch.Tensor:
            if batch.num_tokens > room:
                raise torch.OutOfMemoryError("CUDA out of memory: pretended")
            result: torch.Tensor = forward(batch)
            return result

        backend.logits = logits_of
        result: StepResult = worker.begin(worker.joining(range(rows), True)).result()
        tokens.append(result.tokens.tolist())
    same = tokens[0] == tokens[1]
    return {"rows": rows, "the same tokens in parts": same, "wrong": [] if same or not hour.pretend else ["tokens"]}


PARTS: tuple[Callable[[Hour], Figures], ...] = (
    machine,
    attention,
    drawing,
    logits,
    throughput,
    mixed_steps,
    long_context,
    memory,
    faults,
)


def run(device: torch.device, model: Path | None, dtype: str, pretend: bool, out: Path) -> int:
    """Run all parts, and write both files. Returns 1 if something is wrong or a part has failed, else 0."""
    if pretend:
        # Asked for when triton is first imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    results: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if model is None:
            positions = 512 if pretend else 40_960
            model = gpu.random_model(Path(folder) / "model", "tiny" if pretend else "0.6b", positions)
        hour = Hour(device, model, dtype, pretend)
        for part in PARTS:
            began = time.perf_counter()
            try:
                figures = part(hour)
            except Exception as error:  # the next part may work
                figures = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            results[part.__name__] = {**figures, "seconds": round(time.perf_counter() - began, 1)}
            print(f"{part.__name__}: {json.dumps({k: v for k, v in figures.items() if k != 'traceback'})}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
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
