"""`python -m benchmarks.gpu`: whether a worker on a GPU computes the right thing, and how fast it decodes.

Makes a Qwen3 of random weights (0.6 billion, or a tiny one), and

- compares its greedy logits, in the served dtype and with the attention that the device has, with those of the plain
  reference attention in float32, and says how much the reference attention loses in the served dtype;
- decodes with 1, 64 and 256 rows through the worker's own steps (`Engine.begin`, two in flight on a GPU), without
  server and scheduler, and prints output tokens a second and the share of the time in which the device had no step.

Within a step the device may wait for kernels to be launched; that counts as busy here. Exits with 1 when the logits
disagree and with 2 when there is no such device. `--device cpu --size tiny` runs the same without a GPU.

`--all` measures and checks all that is worth a GPU's hour (benchmarks/gpu_hour.py), and writes a JSON file and a page;
`--all --pretend` does so on a CPU, in seconds, with kernels that are interpreted: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from interfaces import Join, SamplingParams, Step
from model_worker.batch import ForwardBatch
from model_worker.engine import Engine
from model_worker.execution import executors_for
from model_worker.execution.base import DeviceStep, WorkerIdentity
from model_worker.execution.flight import Pending
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.rows import WorkerRows
from model_worker.runner import ModelRunner
from model_worker.sampling.sampler import SamplerRows

SIZES: Mapping[str, Mapping[str, int]] = {
    "0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
    },
    "tiny": {
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
    },
}
CHECKED_PROMPTS = (1, 17, 255, 256, 300)
"""Lengths around the edges of blocks."""
CHECKED_STEPS = 8
STEP_TOKENS = 2048
"""Most tokens of a recorded step with prompts: what servers on GPUs have by default."""
PREFILL_TOKENS = 8192
"""Prompt tokens in one step."""
MOST_LOSS = 1.5
"""How much worse than the reference attention in the same dtype the device's may be, as a ratio of errors."""
LEAST_ERROR = 1e-3
"""Relative error below which nothing is compared."""
NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class Check:
    """Of one runner: relative error of its logits against the reference in float32, and equal greedy tokens."""

    name: str
    error: float
    agreeing: float


@dataclass(frozen=True)
class Speed:
    """Of one number of rows: `busy` is the time in which the device had a step."""

    rows: int
    tokens: int
    seconds: float
    busy: float


def random_model(directory: Path, size: str, positions: int = 4096) -> Path:
    """A Qwen3 with weights wide enough that greedy tokens depend on the context."""
    config = AutoConfig.for_model("qwen3", **SIZES[size], max_position_embeddings=positions, tie_word_embeddings=True)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                wide = 0.25 if "embed_tokens" in name else 1.5 / math.sqrt(parameter.shape[1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * wide)
    model.save_pretrained(directory)
    return directory


def traced(runner: ModelRunner, prompts: Sequence[NDArray[np.int64]], given: Tensor | None) -> Tensor:
    """Logits [steps, prompts, vocabulary] of a prefill and the decode steps after it.

    The tokens of the steps are those of `given` [steps, prompts], or the largest logits' without.
    """
    size, device, count = runner.cache.block_size, runner.loaded.device, len(prompts)
    lens = np.array([len(prompt) for prompt in prompts])
    width = -(-int(lens.max() + CHECKED_STEPS) // size)
    tables = np.random.default_rng(0).permutation(count * width).reshape(count, width)
    ones, last = np.ones(count, np.int64), np.cumsum(lens) - 1
    batch = ForwardBatch.build(np.concatenate(prompts), lens, lens, tables, size, last, device)
    steps = []
    for i in range(CHECKED_STEPS):
        logits = runner.backend.logits(batch).float().cpu()
        steps.append(logits)
        tokens = (logits.argmax(-1) if given is None else given[i]).numpy()
        batch = ForwardBatch.build(tokens, ones, lens + i + 1, tables, size, np.arange(count), device)
    return torch.stack(steps)


def checks(model: Path, device: str, dtype: str) -> list[Check]:
    """Of the reference attention and of the device's own, both in `dtype`."""
    wide = load_model(model, "float32", device, lambda *_: None)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, wide.vocab_size, length) for length in CHECKED_PROMPTS]
    exact = traced(_runner(wide, len(prompts), max(CHECKED_PROMPTS) + CHECKED_STEPS, "reference"), prompts, None)
    del wide
    loaded, found = load_model(model, dtype, device, lambda *_: None), []
    for name in ("reference", "auto"):
        runner = _runner(loaded, len(prompts), max(CHECKED_PROMPTS) + CHECKED_STEPS, name)
        got = traced(runner, prompts, exact.argmax(-1))
        error = float(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
        agreeing = float((got.argmax(-1) == exact.argmax(-1)).float().mean())
        found.append(Check(runner.attention_name, error, agreeing))
    return found


def disagree(reference: Check, own: Check) -> bool:
    """Whether the device's attention loses more than the dtype explains."""
    return not own.error <= max(LEAST_ERROR, MOST_LOSS * reference.error)


def _runner(loaded: LoadedModel, rows: int, length: int, backend: str = "auto", most_tokens: int = 0) -> ModelRunner:
    runner = ModelRunner(loaded, rows * -(-length // loaded.block_size), loaded.block_size, backend)
    runner.warm_up()
    runner.record(rows, length, most_tokens)
    return runner


class Steps:
    """An engine, and the steps that a scheduler would send it: rows of `blocks` blocks each."""

    def __init__(self, engine: Engine, prompt: int, output: int, blocks: int, vocab_size: int) -> None:
        self._engine = engine
        self._prompt, self._output = prompt, output
        self._blocks = blocks
        self._vocab_size = vocab_size
        self._steps = 0

    def begin(self, fields: dict[str, Any]) -> Pending:
        self._steps += 1
        usual: dict[str, Any] = {"ntok": None, "new_blocks": NONE.reshape(0, 3), "drop": NONE, "joins": []}
        return self._engine.begin(Step(incarnation=1, epoch=0, step=self._steps, **usual | fields))

    def joining(self, rows: range, wishes: Mapping[str, Any]) -> dict[str, Any]:
        """A step that computes the whole prompts of new rows, which get all blocks that they will need.

        `wishes` are their sampling values.
        """
        rng = np.random.default_rng(rows.start)
        joins = []
        for row in rows:
            tokens = rng.integers(0, self._vocab_size, self._prompt).astype(np.int32)
            params = SamplingParams(seed=row, max_new_tokens=self._output, **wishes)
            joins.append(Join(row=row, tokens=tokens, prompt_len=self._prompt, start=0, sampling=params))
        blocks = [(row, i, row * self._blocks + i) for row in rows for i in range(self._blocks)]
        return {
            "rows": np.array(rows, np.int32),
            "ntok": np.full(len(rows), self._prompt, np.int32),
            "new_blocks": np.array(blocks, np.int32),
            "joins": joins,
        }


class Worker(Steps):
    """A worker of `rows` rows, in decode steps whose time is taken."""

    def __init__(self, loaded: LoadedModel, rows: int, prompt: int, output: int) -> None:
        length = prompt + output
        runner = _runner(loaded, rows, length, most_tokens=STEP_TOKENS)
        table = WorkerRows(rows, length, loaded.block_size, runner.num_blocks)
        sampler = SamplerRows(rows, loaded.vocab_size, loaded.device)
        sampler.warm_up(loaded.dtype)
        shared = DeviceStep(table, sampler, runner.backend, WorkerIdentity(0, 0))
        self.backend: Any = runner.backend
        self._rows = rows
        engine = Engine(shared, executors_for(shared, loaded.device.type))
        super().__init__(engine, prompt, output, -(-length // loaded.block_size), loaded.vocab_size)

    def measure(self, sampled: bool) -> Speed:
        """Prefills all rows, and takes the time of the decode steps that follow."""
        for start in range(0, self._rows, self._at_once):
            self.begin(self.joining(range(start, min(start + self._at_once, self._rows)), wishes(sampled))).result()
        pending: deque[Pending] = deque()
        rows, busy, tokens = np.arange(self._rows, dtype=np.int32), 0, 0
        started = time.perf_counter()
        for i in range(self._output - 1):
            pending.append(self.begin({"rows": rows}))
            while len(pending) > (1 if i < self._output - 2 else 0):
                result = pending.popleft().result()
                busy, tokens = busy + result.device_us, tokens + len(result.tokens)
        return Speed(self._rows, tokens, time.perf_counter() - started, busy / 1e6)

    @property
    def _at_once(self) -> int:
        return max(1, PREFILL_TOKENS // self._prompt)


def wishes(sampled: bool) -> dict[str, Any]:
    """Return the sampling values of rows that are drawn with top-p, or greedy."""
    return {"temperature": 1.0, "top_p": 0.9} if sampled else {"temperature": 0.0}


def report(checked: Sequence[Check], speeds: Sequence[Speed], dtype: str) -> list[Table]:
    right = Table("attention", f"relative error of {dtype} logits (median)", "greedy tokens as in float32")
    for check in checked:
        right.add_row(check.name, f"{check.error:.2e}", f"{check.agreeing:.1%}")
    fast = Table("rows", "output tok/s", "ms per step", "device idle")
    for speed in speeds:
        steps = speed.tokens / speed.rows
        idle = max(0.0, 1 - speed.busy / speed.seconds)
        per_step = f"{1000 * speed.seconds / steps:.2f}"
        fast.add_row(str(speed.rows), f"{speed.tokens / speed.seconds:.0f}", per_step, f"{idle:.1%}")
    return [right, fast]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--device", default="cuda", help="cuda, cuda:1 or cpu")
    add("--size", choices=sorted(SIZES), default="0.6b")
    add("--model", type=Path, help="a Hugging Face directory instead of random weights")
    add("--dtype", default="bfloat16", help="what is served: bfloat16 or float16")
    add("--concurrency", type=int, nargs="+", default=[1, 64, 256])
    add("--prompt", type=int, default=128, help="tokens of each prompt")
    add("--output", type=int, default=256, help="tokens of each answer, three at least")
    add("--sampled", action="store_true", help="draw with top-p 0.9 instead of taking the largest logit")
    add("--all", action="store_true", help="the whole hour: kernels, throughput, mixed steps, memory, faults")
    add("--parts", nargs="+", default=[], metavar="NAME", help="with --all: these parts of it alone")
    add("--pretend", action="store_true", help="with --all: on a CPU, with a tiny model, to test the hour itself")
    add("--out", type=Path, default=Path("bench-results"), help="folder for the files of --all")
    options = parser.parse_args(arguments)
    if options.pretend and not options.all:
        parser.error("--pretend belongs to --all: use --device cpu --size tiny for the short form")
    if options.output < 3:
        parser.error(f"--output must be at least 3, got {options.output}: the first token belongs to the prompt")
    device = torch.device("cpu" if options.pretend else options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: torch sees none here (--device cpu --size tiny runs without one)", file=sys.stderr)
        return 2
    if options.all:
        from benchmarks import gpu_hour

        return gpu_hour.run(device, options.model, options.dtype, options.pretend, options.out, options.parts)
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = options.model or random_model(Path(folder) / "model", options.size)
        reference, own = checks(model, options.device, options.dtype)
        loaded = load_model(model, options.dtype, options.device, lambda *_: None)
        speeds = []
        for rows in options.concurrency:
            gc.collect()  # an engine and its last steps name each other, and with them the last KV cache
            speeds.append(Worker(loaded, rows, options.prompt, options.output).measure(options.sampled))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    console.print(
        f"{loaded.architecture}, {loaded.parameter_count / 1e6:.0f}M parameters, {options.dtype} on {name}, "
        f"torch {torch.__version__}; prompts of {options.prompt}, answers of {options.output} tokens, "
        f"{'drawn with top-p 0.9' if options.sampled else 'greedy'}"
    )
    console.print(*report([reference, own], speeds, options.dtype))
    if disagree(reference, own):
        console.print(f"the logits of {own.name} attention are wrong: its error is not what {options.dtype} explains")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
