"""Whether numba's compiled kernels are available, and their compilation beside the first answers.

numba compiles for half a minute, and keeps the result for later starts. A worker without kept kernels does not make its
users wait: it computes in plain torch while another process compiles (compile_kernels.py), and then makes room for a
worker that finds them. Knows files and processes. Does not know which kernels there are.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
import torch

from shared.liveness import SUPERVISOR_PID

log = logging.getLogger(__name__)

_numba: Any = numba


# Models whose kernels are compiled together: those that generate, those of them whose weights are in codes, and
# encoders that are built like BERT. Recognisers of speech have an encoder and a decoder, whose weights may be halves
# (gemm/half_linear.py).
DECODER = "decoder"
CODED = "coded"
ENCODER = "encoder"
HALVES = "halves"
SPEECH = "speech"
SPEECH_IN_HALVES = "speech-in-halves"
FAMILIES = (DECODER, CODED, ENCODER, HALVES, SPEECH, SPEECH_IN_HALVES)
_PARTS = {SPEECH: (DECODER, ENCODER), SPEECH_IN_HALVES: (DECODER, ENCODER, HALVES)}


def parts_of(family: str) -> tuple[str, ...]:
    """The families whose kernels models of this one need."""
    return _PARTS.get(family, (family,))


def are_compiled(dtype: torch.dtype, family: str = DECODER) -> bool:
    """Whether the kernels of a family for weights of `dtype` were compiled before, on such a CPU.

    True also where nothing can be kept, so that there is no point in waiting.
    """
    marks = [_mark(dtype, part) for part in parts_of(family)]
    return all(mark is None or mark.exists() for mark in marks)


def record_compiled(dtype: torch.dtype, family: str = DECODER) -> None:
    """Record that all kernels of a family for weights of `dtype` have been compiled."""
    mark = _mark(dtype, family)
    if mark is not None:
        mark.touch()


class Compilation:
    """A process that compiles the kernels of a family for weights of `dtype`."""

    def __init__(self, dtype: torch.dtype, family: str = DECODER) -> None:
        """Start the process."""
        log.info("kernels are being compiled, once for this machine: until then answers are slow (about a minute)")
        self._dtype = dtype
        self._family = family
        self._done: bool | None = None
        name = str(dtype).removeprefix("torch.")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "model_worker.compile_kernels", "--dtype", name, "--family", family],
            env={**os.environ, SUPERVISOR_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
        )

    @property
    def done(self) -> bool:
        """Whether a worker that starts now finds the kernels. Stays False if the process has failed."""
        if self._done is None and self._process.poll() is not None:
            self._done = are_compiled(self._dtype, self._family)
            if not self._done:
                log.error("the kernels could not be compiled, for the reason above: answers stay slow")
        return bool(self._done)


def _mark(dtype: torch.dtype, family: str) -> Path | None:
    """Return a file beside the kernels of these sources, this CPU and numba. None where there is no place to keep
    any."""
    directory = Path(os.environ.get("NUMBA_CACHE_DIR", ""))
    if not directory.name:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(directory, os.W_OK):
        return None
    # By these numba judges whether its kept code may be used: also by where a source lies and when it was written.
    known = [_numba.__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        stat = source.stat()
        known.append(f"{source} {stat.st_mtime_ns} {stat.st_size}")
    digest = blake2b("\n".join(known).encode(), digest_size=8).hexdigest()
    name = str(dtype).removeprefix("torch.")
    return directory / f"compiled-{name if family == DECODER else f'{family}-{name}'}-{digest}"
