"""The host's time for a decode step around what a GPU computes, where there is no GPU.

Kernels, and with them the recorded pass, are replaced by nothing; all else of a step runs: packing rows, the columns of
pass and draw in one piece of memory, looking for a recording, the calls of launches, and the result that is read. What
a driver takes for a launch is not in it. Knows a worker's steps; knows no model.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import Steps
from interfaces import LogprobMode
from model_worker import batch as batches
from model_worker.batch import ForwardBatch
from model_worker.cuda.graphs import DecodeBuffers, DecodeGraphs
from model_worker.device_copy import packed_together
from model_worker.engine import Engine
from model_worker.execution import executors_for
from model_worker.execution.base import DeviceStep, WorkerIdentity
from model_worker.execution.flight import Pending
from model_worker.rows import WorkerRows
from model_worker.sampling.draw_triton import TritonDraw
from model_worker.sampling.sampler import SamplerRows

Figures = dict[str, Any]
# What all rows ask for.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "biased": {"temperature": 0.8, "logit_bias": {5: 1.0}, "bad_words": [[7]], "min_new_tokens": 9},
    "log-probabilities": {"temperature": 0.0, "logprobs": LogprobMode.TEMPERED, "top_logprobs": 5},
    "log-probabilities of what is kept": {"temperature": 0.8, "top_p": 0.9, "logprobs": LogprobMode.WARPED}
    | {"top_logprobs": 20, "logprob_ids": (1, 2)},
}
_BLOCK = 16
_VOCABULARY = 64
_CPU = torch.device("cpu")


class _Recorded:
    """A backend whose passes are recordings of nothing."""

    gives_hidden_states = takes_adapters = row_invariant = keeps_states = False
    device = _CPU

    def __init__(self, rows: int, blocks: int) -> None:
        self._logits = torch.zeros(rows, _VOCABULARY)
        buffers = DecodeBuffers(rows, blocks, _BLOCK, rows * blocks, _CPU, kernels=True)
        self._graphs = DecodeGraphs(lambda _: self._logits, buffers, _recorded)

    def logits(self, batch: ForwardBatch) -> Tensor:
        if self._graphs.fits(batch):
            return self._graphs.run(batch)
        return self._logits[: len(batch.logit_positions)]


class _HostWorker(Steps):
    """A worker's engine on such a backend."""

    def __init__(self, rows: int, prompt: int, output: int) -> None:
        blocks = -(-(prompt + output) // _BLOCK)
        table = WorkerRows(rows, prompt + output, _BLOCK, rows * blocks)
        sampler = SamplerRows(rows, _VOCABULARY, _CPU, counts_there=True)
        sampler.use_kernels(TritonDraw(_CPU, _VOCABULARY))
        backend: Any = _Recorded(rows, blocks)
        shared = DeviceStep(table, sampler, backend, WorkerIdentity(0, 0))
        super().__init__(Engine(shared, executors_for(shared, "cuda")), prompt, output, blocks, _VOCABULARY)


def host_costs(rows: int, steps: int) -> Figures:
    """Return the median microseconds of the host for a decode step of `rows` rows, for each kind: of its launch, and
    of its result."""
    found: Figures = {}
    with torch.no_grad(), _launching_nothing():
        for kind, wishes in KINDS.items():
            worker = _HostWorker(rows, 16, steps + 16)
            worker.begin(worker.joining(range(rows), wishes)).result()
            found[f"{kind}, {rows} rows, us (launch + result)"] = _costs(worker, rows, steps)
    return found


def _costs(worker: Steps, rows: int, steps: int) -> str:
    index = np.arange(rows, dtype=np.int32)
    pending: deque[Pending] = deque()
    launches, results = [], []
    for _ in range(steps):
        began = time.perf_counter()
        pending.append(worker.begin({"rows": index}))
        launched = time.perf_counter()
        launches.append(launched - began)
        if len(pending) > 1:
            pending.popleft().result()
            results.append(time.perf_counter() - launched)
    while pending:
        pending.popleft().result()
    return " + ".join(f"{1e6 * statistics.median(times):.0f}" for times in (launches, results))


def _recorded(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A replay has the result at hand."""
    result = function()
    return lambda: result


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Let kernels do nothing, and let columns be packed as for a GPU."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *arguments: Any, **_: Any) -> None:
        if kernel.__name__ == "finish_kernel":
            # Memory as it came is no token.
            arguments[0].zero_()

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(InterpretedFunction, "run", run),
        mock.patch.object(batches, "upload_together", packed_together),
    ):
        yield
