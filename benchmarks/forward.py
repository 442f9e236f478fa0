"""`python -m benchmarks.forward`: what one forward pass of the worker costs, without server, scheduler and sampling.

Times decode steps of several batch sizes, greedy steps in a row, and one prefill chunk: once with the model's modules
as transformers made them, once with packed linear layers, once fused, all with the same attention kernel; with --int8
the last two also with int8 weights. With --without the fused stack alone, as it is and without one of its mechanisms.
The variants take turns, so that a busy machine is unfair to none. Beside the times it prints what they mean: bytes a
second against the bandwidth that reading memory reaches here, and FLOP a second against the best matrix product. Takes
about a minute.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.standard_model import SIZES, standard_model
from model_worker.attention import PAGED_ATTENTION
from model_worker.batch import DeferredTokens, ForwardBatch
from model_worker.cpu.fused.stack import FusedStack, fused_stack
from model_worker.cpu.gemm.int8_linear import Int8Linear
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cpu.gemm.screened_head import SCREENED_ROWS
from model_worker.cpu.tuning import EVERYTHING, Tuning
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner

BLOCK_SIZE = 16
# Greedy steps that are timed together, of which each is launched before the tokens of the one before are read.
GREEDY_STEPS = 8


@dataclass(frozen=True)
class Work:
    """A batch, and what it asks of the machine at least: each cached K and V is read once, as is each weight."""

    name: str
    batch: ForwardBatch
    flop: float
    kv_bytes: float
    greedy: bool = False


@dataclass(frozen=True)
class Machine:
    read_gb: float  # GB/s
    matrix_gflop: float  # GFLOP/s in the model's dtype


def decode(loaded: LoadedModel, rows: int, context: int, shared: int = 0, greedy: bool = False) -> Work:
    """One token for each row, whose other `context - 1` tokens are cached, the first `shared` of them once for all."""
    lengths = np.full(rows, context)
    batch = _batch(np.ones(rows, np.int64), lengths, np.arange(rows), shared)
    name = f"{'greedy' if greedy else 'decode'}, {rows} x {context}"
    return Work(name, batch, *_needs(loaded, batch, rows * context, rows), greedy)


def prefill(loaded: LoadedModel, tokens: int) -> Work:
    """One prompt in one chunk. Each token attends to those before it: half of them on average."""
    batch = _batch(np.array([tokens]), np.array([tokens]), np.array([tokens - 1]))
    return Work(f"prefill, {tokens}", batch, *_needs(loaded, batch, tokens * tokens // 2, 1))


def _batch(query_lens: np.ndarray, kv_lens: np.ndarray, logit_rows: np.ndarray, shared: int = 0) -> ForwardBatch:
    rng = np.random.default_rng(0)
    per_row = -(-int(kv_lens.max()) // BLOCK_SIZE)
    tables = rng.permutation(len(kv_lens) * per_row).reshape(len(kv_lens), per_row)
    tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE]
    tokens = rng.integers(100, 1000, int(query_lens.sum()))
    return ForwardBatch.build(tokens, query_lens, kv_lens, tables, BLOCK_SIZE, logit_rows)


def _needs(loaded: LoadedModel, batch: ForwardBatch, pairs: int, logit_rows: int) -> tuple[float, float]:
    """FLOP, and bytes read of the cache. `pairs` are those of query and key."""
    head = loaded.model.lm_head
    sizes = {m: m.in_features * m.out_features for m in linears(loaded)}
    products = sum(size * (logit_rows if m is head else batch.num_tokens) for m, size in sizes.items())
    layout = loaded.attention.layout
    # A group of query heads shares K and V in memory, but not in arithmetic.
    heads = loaded.model.config.num_attention_heads / layout.layers[0].kv_heads
    elements = layout.bytes_per_token / layout.dtype.itemsize
    return 2 * products + 2 * pairs * elements * heads, int(batch.kv_len.sum()) * layout.bytes_per_token


def linears(loaded: LoadedModel) -> list[PackedLinear | Int8Linear | nn.Linear]:
    kinds = PackedLinear | Int8Linear | nn.Linear
    return [module for module in loaded.model.modules() if isinstance(module, kinds)]


def weight_bytes(loaded: LoadedModel) -> int:
    """What a pass reads of linear layers."""
    return sum(m.weight.nbytes if isinstance(m, nn.Linear) else m.num_bytes for m in linears(loaded))


def variants(path: Path, loaded: LoadedModel, int8: LoadedModel | None, num_blocks: int) -> dict[str, ModelRunner]:
    auto: Any = AutoModelForCausalLM
    unpacked = auto.from_pretrained(path, dtype=loaded.dtype, attn_implementation=PAGED_ATTENTION).eval()
    layers = dict(zip(loaded.model.modules(), unpacked.modules(), strict=True))
    attention = replace(
        loaded.attention, layer_of={layers[module]: index for module, index in loaded.attention.layer_of.items()}
    )
    made = {
        "modules": replace(loaded, model=unpacked, attention=attention, stack=None),
        "+ packed linears": replace(loaded, stack=None),
    }
    if loaded.stack is not None:
        made["fused stack"] = loaded
    if int8 is not None:
        made["int8 linears"] = replace(int8, stack=None)
    if int8 is not None and int8.stack is not None:
        made["int8 fused stack"] = int8
    return {name: ModelRunner(variant, num_blocks, BLOCK_SIZE) for name, variant in made.items()}


def with_and_without(loaded: LoadedModel, name: str, num_blocks: int) -> dict[str, ModelRunner]:
    """The fused stack with all mechanisms, and without one."""
    less = replace(loaded, stack=fused_stack(loaded, EVERYTHING.without(name)))
    made = {"fused stack": loaded, f"without {name}": less}
    return {variant: ModelRunner(model, num_blocks, BLOCK_SIZE) for variant, model in made.items()}


def wait_for_copies(runners: Mapping[str, ModelRunner], work: Work) -> None:
    """Run a pass of each, and wait for the copies of weights that it has asked for."""
    for runner in runners.values():
        runner.backend.logits(replace(work.batch))
        if isinstance(runner.loaded.stack, FusedStack):
            runner.loaded.stack.wait_for_copies()


def machine(dtype: torch.dtype) -> Machine:
    memory = torch.ones(1 << 28)
    a = torch.randn(2048, 2048).to(dtype)
    product = PackedLinear(a, None)
    with torch.inference_mode():
        reading, multiplying = _best(lambda: memory.sum()), _best(lambda: product(a))
    return Machine(memory.nbytes / reading / 1e9, 2 * 2048**3 / multiplying / 1e9)


def _best(action: Callable[[], object], seconds: float = 1.5) -> float:
    return min(times_in_turns([action], seconds)[0])


def times_in_turns(actions: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Durations of each action, in turns for about so many seconds each, five turns at least."""
    for action in actions:
        action()
    durations: list[list[float]] = [[] for _ in actions]
    end = time.perf_counter() + seconds * len(actions)
    while time.perf_counter() < end or len(durations[0]) < 5:
        for action, own in zip(actions, durations, strict=True):
            start = time.perf_counter()
            action()
            own.append(time.perf_counter() - start)
    return durations


def measure(runners: Mapping[str, ModelRunner], work: Work, seconds: float) -> dict[str, list[float]]:
    def action(runner: ModelRunner) -> Callable[[], object]:
        # A new batch each time, as in service: plans that belong to it are made anew.
        if work.greedy:
            return lambda: greedy_steps(runner, work)
        return lambda: runner.backend.logits(replace(work.batch))

    times = times_in_turns([action(runner) for runner in runners.values()], seconds)
    steps = GREEDY_STEPS if work.greedy else 1
    return {name: [duration / steps for duration in own] for name, own in zip(runners, times, strict=True)}


def greedy_steps(runner: ModelRunner, work: Work, count: int = GREEDY_STEPS) -> None:
    """Run greedy steps in a row, as an executor does: launched ahead where the backend does that."""
    rows = len(work.batch.logit_positions)
    if not runner.backend.overlaps:
        for _ in range(count):
            runner.backend.greedy(replace(work.batch), np.zeros(rows, np.bool_))
        return
    known = np.full(work.batch.num_tokens, -1)
    deferred = DeferredTokens(known, np.full(rows, -1), np.empty(0, np.int64))
    launched = runner.backend.launch(replace(work.batch), deferred)
    for _ in range(count - 1):
        following = runner.backend.launch(replace(work.batch), deferred)
        launched()
        launched = following
    launched()


def table(
    works: Sequence[Work], results: Sequence[Mapping[str, list[float]]], weights: Mapping[str, int], machine: Machine
) -> Table:
    out = Table("work", "variant", "ms (median)", "min", "max", "GB/s", "of read", "GFLOP/s", "of product")
    for work, result in zip(works, results, strict=True):
        for variant, times in result.items():
            median = statistics.median(times)
            gb, gflop = (weights[variant] + work.kv_bytes) / median / 1e9, work.flop / median / 1e9
            shares = f"{gb / machine.read_gb:.0%}", f"{gflop / machine.matrix_gflop:.0%}"
            ms = (f"{1000 * value:.2f}" for value in (median, min(times), max(times)))
            out.add_row(work.name, variant, *ms, f"{gb:.1f}", shares[0], f"{gflop:.0f}", shares[1])
    return out


def gains(works: Sequence[Work], results: Sequence[Mapping[str, list[float]]]) -> Table:
    """How many times as long a pass takes without the mechanism: of the medians, and the quartiles of pairs."""
    out = Table("work", "gain", "of pairs, 1st to 3rd quartile")
    for work, result in zip(works, results, strict=True):
        having, lacking = result.values()
        ratios = [less / more for more, less in zip(having, lacking, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        out.add_row(
            work.name, f"{statistics.median(lacking) / statistics.median(having):.3f}", f"{low:.3f} to {high:.3f}"
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face directory; without it the standard model is made for the occasion")
    add("--size", choices=sorted(SIZES), default="135m", help="of the standard model")
    add("--dtype", default="auto")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--rows", type=int, nargs="+", default=[1, 4, 16, 32], help="rows of the decode steps")
    add("--context", type=int, default=256, help="tokens of each decode row")
    add("--prefill", type=int, default=512, help="tokens of the prefill chunk")
    add("--shared", type=int, default=0, help="first tokens of decode rows that all rows have in common")
    add("--int8", action="store_true", help="also with int8 weights")
    add("--without", choices=Tuning.names(), help="compare the fused stack with itself without this mechanism")
    add("--seconds", type=float, default=2.0, help="for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or standard_model(Path(folder) / "model", options.size)
        started = time.perf_counter()
        loaded = load_model(path, options.dtype, "cpu", lambda *_: None)
        loading = time.perf_counter() - started
        int8 = load_model(path, options.dtype, "cpu", lambda *_: None, quantization="int8") if options.int8 else None
        if options.without and loaded.stack is None:
            parser.error(f"--without {options.without}: {loaded.architecture} is not served by the fused stack")
        greedy = [rows for rows in options.rows if rows <= SCREENED_ROWS]
        works = [
            *(decode(loaded, rows, options.context, options.shared) for rows in options.rows),
            *(decode(loaded, rows, options.context, options.shared, greedy=True) for rows in greedy),
            prefill(loaded, options.prefill),
        ]
        num_blocks = max(int(work.batch.block_tables.max()) + 1 for work in works)
        if options.without:
            runners = with_and_without(loaded, options.without, num_blocks)
        else:
            runners = variants(path, loaded, int8, num_blocks)
    wait_for_copies(runners, works[0])
    best = machine(loaded.dtype)
    results = [measure(runners, work, options.seconds) for work in works]
    console = Console(width=130)
    console.print(
        f"{loaded.architecture}, {loaded.parameter_count / 1e6:.0f}M parameters, {loaded.dtype}, "
        f"{options.threads} threads, loaded in {loading:.1f} s; "
        f"reads {best.read_gb:.1f} GB/s, multiplies {best.matrix_gflop:.0f} GFLOP/s; "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    weights = {name: weight_bytes(runner.loaded) for name, runner in runners.items()}
    console.print(table(works, results, weights, best))
    if options.without:
        console.print(gains(works, results))


if __name__ == "__main__":
    main()
