"""`python -m benchmarks.adapters`: what adapters cost the fused stack of a CPU, in greedy steps as a worker runs them.

Makes 16 adapters with random weights for all linear layers. In each round the steps of the base model are timed before
the adapters are loaded and after they have gone; between, in turns, those of the base beside loaded adapters, of one
adapter at one row, and of one, four and sixteen adapters over sixteen rows. A cost is the median over rounds of the
ratio to the base's steps of that round, with the quartiles. Without --model the standard model is made for the
occasion.

The benchmark prints each phase and each turn on standard error. A round has five turns at least, however long its steps
take: a busy machine may need hours for what takes minutes. So no round begins that would not be over within --limit,
the rounds so far are shown, and the exit status is 1 if they are fewer than asked for. What hangs is ended by a
watchdog, which shows the stacks of all threads: preparation after an hour, rounds a minute after twice the limit.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks import forward
from benchmarks.standard_model import LARGER, SIZES, standard_model
from model_worker.backends.base import Backend
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner

LOADED = 16
ROWS = 16
# Steps of a turn: so few that five turns of all cases fit into a round on a slow machine, too.
STEPS = 4
# Most that the model, its kernels and the adapters may take.
PREPARATION_SECONDS = 3600.0
# Most that a row may cost beside one of the base, as a share.
_TARGETS = {"one of one": 0.08, "sixteen of four": 0.20, "base of one": 0.01, "base of sixteen": 0.01}


class Case(NamedTuple):
    """Rows with adapters, and the number of the steps of the base with which they are compared."""

    name: str
    work: forward.Work
    plain: forward.Work


def make_adapter(loaded: LoadedModel, folder: Path, rank: int, seed: int) -> Path:
    """Write an adapter as PEFT writes it, with small random weights, for all linear layers but the output embedding."""
    draws = torch.Generator().manual_seed(seed)
    model: Any = loaded.model
    head = model.get_output_embeddings()
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if module is head or not (hasattr(module, "in_features") and hasattr(module, "out_features")):
            continue
        linear: Any = module
        for part, shape in (("lora_A", (rank, linear.in_features)), ("lora_B", (linear.out_features, rank))):
            drawn = torch.randn(*shape, generator=draws) * 1e-2
            tensors[f"base_model.model.{name}.{part}.weight"] = drawn.to(loaded.dtype)
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def cases(loaded: LoadedModel, context: int) -> list[Case]:
    """Return what is timed with adapters loaded; the names are those of the targets."""
    one = forward.decode(loaded, 1, context, greedy=True)
    many = forward.decode(loaded, ROWS, context, greedy=True)
    return [
        Case("base of one", one, one),
        Case("one of one", _with(one, [1]), one),
        Case("base of sixteen", many, many),
        Case("sixteen of one", _with(many, [1] * ROWS), many),
        Case("sixteen of four", _with(many, [1 + i % 4 for i in range(ROWS)]), many),
        Case("sixteen of sixteen", _with(many, [1 + i for i in range(ROWS)]), many),
    ]


def _with(work: forward.Work, handles: Sequence[int]) -> forward.Work:
    """Return the same work with an adapter for each row."""
    return replace(work, batch=replace(work.batch, adapters=np.array(handles, np.int32)))


class Deadline:
    """When no further round may begin. The watchdog ends a process that hangs."""

    def __init__(self, seconds: float) -> None:
        """`seconds` count from `begin_rounds` on."""
        self._seconds = seconds
        self._start = self._first_round = time.monotonic()
        # It needs neither Python's interpreter nor its lock.
        faulthandler.dump_traceback_later(PREPARATION_SECONDS, exit=True)

    def begin_rounds(self) -> None:
        self._first_round = time.monotonic()
        faulthandler.dump_traceback_later(2 * self._seconds + 60, exit=True)

    def has_room(self, seconds: float) -> bool:
        """Whether a round that takes so long would be over in time."""
        return time.monotonic() - self._first_round + seconds <= self._seconds

    def tell(self, what: str) -> None:
        print(f"{time.monotonic() - self._start:6.0f} s  {what}", file=sys.stderr, flush=True)


def rounds(
    runner: ModelRunner,
    folders: Sequence[Path],
    found: Sequence[Case],
    count: int,
    seconds: float,
    deadline: Deadline,
) -> dict[str, list[float]]:
    """Return the ratio of each case's median step to that of the base, by round: of as many as there is time for."""
    backend = runner.backend
    plains = {case.plain.name: case.plain for case in found}
    ratios: dict[str, list[float]] = {case.name: [] for case in found}
    longest = 0.0
    deadline.begin_rounds()
    for number in range(1, count + 1):
        begun = time.monotonic()
        if not deadline.has_room(longest):
            deadline.tell(f"round {number} of {count} is left out: it would take {longest:.0f} s, beyond --limit")
            break
        # Half before the adapters are there, and half after they have gone.
        deadline.tell(f"round {number} of {count}: the base alone")
        before = _medians(runner, plains, seconds / 2)
        deadline.tell(f"round {number} of {count}: loading {len(folders)} adapters")
        for handle, folder in enumerate(folders, start=1):
            backend.load_adapter(handle, str(folder))
        deadline.tell(f"round {number} of {count}: {len(found)} cases with adapters loaded")
        times = _medians(runner, {case.name: case.work for case in found}, seconds)
        _drop_all(backend, len(folders))
        deadline.tell(f"round {number} of {count}: the base alone, once more")
        after = _medians(runner, plains, seconds / 2)
        for case in found:
            plain = (before[case.plain.name] + after[case.plain.name]) / 2
            ratios[case.name].append(times[case.name] / plain)
        longest = max(longest, time.monotonic() - begun)
    return ratios


def _drop_all(backend: Backend, count: int) -> None:
    for handle in range(1, count + 1):
        backend.drop_adapter(handle)


def _medians(runner: ModelRunner, works: Mapping[str, forward.Work], seconds: float) -> dict[str, float]:
    """Time works in turns. Returns the median time of each."""

    def action(work: forward.Work) -> Callable[[], None]:
        return lambda: forward.greedy_steps(runner, work, STEPS)

    times = forward.times_in_turns([action(work) for work in works.values()], seconds)
    return {name: statistics.median(own) for name, own in zip(works, times, strict=True)}


def table(ratios: Mapping[str, list[float]]) -> Table:
    out = Table("rows", "cost", "1st to 3rd quartile", "target")
    for name, values in ratios.items():
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
        target = _TARGETS.get(name)
        shown = "" if target is None else f"at most {target:.0%}"
        out.add_row(name, f"{statistics.median(values) - 1:+.1%}", f"{low - 1:+.1%} to {high - 1:+.1%}", shown)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face directory or GGUF file; else the standard model")
    add("--size", choices=sorted({*SIZES, *LARGER}), default="135m", help="of the standard model")
    add("--dtype", default="auto")
    add("--quantization", default="none", help="none or int8")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--rank", type=int, default=16, help="of the adapters")
    add("--context", type=int, default=256, help="tokens of each row")
    add("--rounds", type=int, default=6, help="how often adapters are loaded and unloaded")
    add("--seconds", type=float, default=1.0, help="for each figure of a round")
    add("--limit", type=float, default=1200.0, help="seconds for all rounds: none begins that would take longer")
    options = parser.parse_args()
    if options.limit <= 0 or options.rounds < 1 or options.seconds <= 0:
        parser.error("--limit, --rounds and --seconds must be above 0")
    torch.set_num_threads(options.threads)
    deadline = Deadline(options.limit)
    signal.signal(signal.SIGTERM, _end_by_signal)
    with tempfile.TemporaryDirectory() as name:
        deadline.tell("making the model" if options.model is None else f"reading {options.model}")
        path = options.model or standard_model(Path(name) / "model", options.size)
        deadline.tell("loading the model, and compiling kernels that are not there yet (minutes)")
        loaded = load_model(path, options.dtype, "cpu", lambda *_: None, quantization=options.quantization)
        if loaded.stack is None:
            parser.error(f"{loaded.architecture} is not served by the fused stack, whose costs are measured here")
        deadline.tell(f"making {LOADED} adapters")
        folders = [make_adapter(loaded, Path(name) / str(seed), options.rank, seed) for seed in range(LOADED)]
        found = cases(loaded, options.context)
        runner = ModelRunner(loaded, int(found[-1].work.batch.block_tables.max()) + 1, forward.BLOCK_SIZE)
        deadline.tell("making copies of weights")
        forward.wait_for_copies({"": runner}, found[0].work)
        ratios = rounds(runner, folders, found, options.rounds, options.seconds, deadline)
    faulthandler.cancel_dump_traceback_later()
    done = len(ratios[found[0].name])
    console = Console(width=110)
    console.print(
        f"{loaded.architecture}, {loaded.parameter_count / 1e6:.0f}M parameters, {loaded.dtype}, rank {options.rank}, "
        f"{options.threads} threads, {done} of {options.rounds} rounds; load average {os.getloadavg()[0]:.1f}"
    )
    if done:
        console.print(table(ratios))
    if done < options.rounds:
        sys.exit(f"only {done} of {options.rounds} rounds ended within {options.limit:.0f} s: raise --limit")


def _end_by_signal(number: int, _frame: object) -> None:
    """End with a word: SystemExit removes the temporary folder, too."""
    sys.exit(f"ended by signal {number} ({signal.Signals(number).name})")


if __name__ == "__main__":
    main()
