"""Kernels compiled in another way than for this process: tests run again in processes of their own, beside the others.

Each compiles all that it needs, which takes most of its time. One runs at a time: the other core has the other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

# For a process that compiles all it needs: 90 seconds on a slow machine, and several times that in a bad one of its
# minutes.
SECONDS_TO_COMPILE = 360.0

_FOLDER = Path(__file__).parent
_TILES = (
    "cpu/test_fused_stack.py::test_tiles_multiply",
    "cpu/test_int8_linear.py::test_int8_tiles_multiply",
    "cpu/test_int8_linear.py::test_digits_say_an_operand",
    "cpu/test_int8_linear.py::test_cores_share_the_work",
    "cpu/test_softmax.py",
    "cpu/test_low_rank.py",
)


@dataclass(frozen=True)
class Run:
    """Tests, and the environment that has their kernels compiled in another way."""

    environment: Mapping[str, str]
    tests: tuple[str, ...]


def on_haswell(instructions: str, *tests: str) -> Run:
    """Tests compiled for a processor without AVX-512, with these instructions among those that are looked for."""
    return Run({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": instructions}, tests)


RUNS = {
    # Processors that multiply no bytes in fours. Activations are float32 there, in attention too.
    "AVX2": on_haswell(
        "+avx2,+fma",
        *_TILES,
        "cpu/test_fused_stack.py::test_bfloat16_stack_is_no_further_from_the_truth_than_the_modules[True-qwen3]",
        "cpu/test_row_invariance.py",
        "cpu/test_encoder.py::test_attention_is_the_naive_one",
    ),
    # Weights in codes there, whose bytes are multiplied as pairs of 16 bits.
    "AVX2, codes": on_haswell(
        "+avx2,+fma,+f16c",
        "cpu/test_coded_linear.py::test_products_are_those_of_the_dequantised_weight",
        "cpu/test_coded_linear.py::test_a_row_does_not_depend_on_the_others",
        "cpu/test_kv_codes.py::test_every_code_is_widened_to_its_number",
    ),
    # Processors of which nothing is known.
    "no instructions": on_haswell("", *_TILES),
    # Numba checks no index, so a wrong one corrupts memory in silence; compiled with checks, it ends a test.
    "checked indexes": Run(
        {"NUMBA_BOUNDSCHECK": "1"},
        (
            "cpu/test_fused_stack.py::test_float32_stack_gives_the_logits_of_the_modules[True-qwen3]",
            "adapters/test_adapters.py::test_every_kind_gives_the_logits_of_merged_weights[qwen3]",
            "test_attention.py::test_blocks_and_heads_of_unusual_sizes",
            "cpu/test_encoder.py::test_attention_is_the_naive_one",
        ),
    ),
}


@dataclass
class Apart:
    """Some of RUNS, begun when it is made; `close` ends those that were not waited for."""

    names: Iterable[str]
    folder: Path
    """For kernels: numba does not tell all of these environments apart."""
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _running: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._outcomes: dict[str, Future[str]] = {name: self._threads.submit(self._run, name) for name in self.names}

    def failure(self, name: str) -> str:
        """What pytest said if a test of this run failed, else nothing."""
        return self._outcomes[name].result(SECONDS_TO_COMPILE)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._running:
            process.kill()
        self._threads.shutdown()

    def _run(self, name: str) -> str:
        run = RUNS[name]
        environment = {**os.environ, **run.environment, "NUMBA_CACHE_DIR": str(self.folder / name.replace(" ", "-"))}
        # Whatever else wants the core comes first: compiled kernels are never late.
        command = ["nice", "-n", "5", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"{_FOLDER}/{test}" for test in run.tests]
        with subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            self._running.append(process)
            output, _ = process.communicate()
        return "" if process.returncode == 0 else output or f"exit status {process.returncode}"
