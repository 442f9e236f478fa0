"""What is left for K and V of a GPU's memory, with a stand-in for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker import step_limits
from model_worker.cuda.memory import (
    GIB,
    SHARE,
    CudaMemory,
    MemoryPlan,
    explain_no_memory,
    is_for_want_of_memory,
    plan_memory,
)
from model_worker.execution import kv_memory
from model_worker.execution.rehearsal import AdapterWish, Rehearsal, gpu_kv_memory
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.sampling.device_penalties import most_bytes
from shared.settings import Settings
from tests.model_worker.tiny_models import tiny_model


class StandIn:
    """A GPU with weights on it, on which work takes as much memory as the work has said."""

    def __init__(self, total: int, weights: int, others: int = 0) -> None:
        self.total = total
        self.allocated = self.reserved = weights
        self.free = total - weights - others
        self.peak = 0

    def peak_of(self, work: Callable[[], None]) -> int:
        self.peak = 0
        work()
        return self.peak

    def taking(self, size: int) -> Callable[[], None]:
        def work() -> None:
            self.peak = max(self.peak, size)

        return work


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tiny_model("llama", tmp_path_factory.mktemp("memory"))
    return load_model(path, "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False)


def test_weights_and_steps_come_first() -> None:
    gpu = StandIn(24 * GIB, 15 * GIB)
    plan = plan_memory(gpu, 1, gpu.taking(2 * GIB), gpu.taking(GIB))
    assert plan.kv_cache == int(24 * GIB * SHARE) - 18 * GIB
    assert "weights 15.0 GiB, the largest step 2.0 GiB, recorded steps 1.0 GiB, K/V 3.6 GiB" in str(plan)


def test_workers_on_one_gpu_share_it() -> None:
    gpu = StandIn(80 * GIB, 10 * GIB)
    plans = [plan_memory(gpu, workers, gpu.taking(GIB), gpu.taking(0)) for workers in (1, 2, 4)]
    assert [plan.budget for plan in plans] == [int(80 * GIB * SHARE) // workers for workers in (1, 2, 4)]
    assert sum(4 * (plan.weights + plan.step + plan.kv_cache) for plan in plans[2:]) <= 80 * GIB * SHARE


def test_what_other_processes_hold_is_not_given_away() -> None:
    gpu = StandIn(80 * GIB, 10 * GIB, others=60 * GIB)
    plan = plan_memory(gpu, 1, gpu.taking(GIB), gpu.taking(0))
    assert plan.kv_cache < 9 * GIB


def test_kept_weights_count_as_weights_and_not_as_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator knows nothing of them, and they are not free either."""
    for name, value in (
        ("mem_get_info", (80 * GIB - 31 * GIB, 80 * GIB)),
        ("memory_allocated", GIB),
        ("memory_reserved", GIB),
        ("max_memory_allocated", 3 * GIB),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    gpu = CudaMemory(torch.device("cuda:0"), kept=30 * GIB)
    plan = plan_memory(gpu, 1, lambda: None, lambda: None)
    assert (plan.weights, plan.step, plan.recorded) == (31 * GIB, 2 * GIB, 2 * GIB)
    assert plan.kv_cache == int(80 * GIB * SHARE) - 35 * GIB
    text, may_pass = explain_no_memory(gpu, torch.OutOfMemoryError("CUDA out of memory."))
    assert "it holds 31.0 GiB, and other processes and the driver 0.0 GiB" in text
    assert not may_pass


def test_the_largest_steps_are_run(loaded: LoadedModel) -> None:
    batches = []
    steps = Rehearsal(loaded, max_tokens=50, max_rows=6, max_model_len=40)
    backend = steps._runner.backend
    forward = backend.logits

    def logits(batch: object) -> torch.Tensor:
        batches.append(batch)
        return forward(batch)  # type: ignore[arg-type]

    backend.logits = logits  # type: ignore[method-assign]
    steps.prompts()
    steps.decode()
    prompts, decode = batches
    assert prompts.kv_len.tolist() == [40, 10]  # type: ignore[attr-defined]
    assert len(prompts.logit_positions) == 6  # type: ignore[attr-defined]
    assert (decode.num_sequences, decode.max_query, decode.max_kv) == (6, 1, 40)  # type: ignore[attr-defined]


def test_a_gpu_without_room_is_refused_with_numbers(loaded: LoadedModel) -> None:
    plan = gpu_kv_memory(loaded, StandIn(GIB, 1000), 1, 50, 6, None)
    assert plan.kv_cache == int(GIB * SHARE) - 1000 - most_bytes(6, loaded.vocab_size)
    with pytest.raises(ValueError, match=r"no memory is left for the KV cache on a GPU of 1\.0 GiB, of which 0\.9 GiB"):
        gpu_kv_memory(loaded, StandIn(GIB, GIB), 1, 50, 6, None)


def test_memory_for_adapters_is_kept_before_k_and_v() -> None:
    gpu = StandIn(80 * GIB, 16 * GIB)
    plan = plan_memory(gpu, 1, gpu.taking(2 * GIB), gpu.taking(2 * GIB))
    assert plan.with_adapters(5 * GIB).kv_cache == plan.kv_cache - 5 * GIB
    assert "recorded steps 2.0 GiB, adapters 5.0 GiB, K/V 47.0 GiB" in str(plan.with_adapters(5 * GIB))
    assert plan.with_adapters(None).adapters == plan.kv_cache // 16
    small = plan_memory(StandIn(24 * GIB, 16 * GIB), 1, lambda: None, lambda: None)
    assert small.with_adapters(None).adapters == GIB, "a few adapters fit in any case"
    tiny = plan_memory(StandIn(20 * GIB, 17 * GIB), 1, lambda: None, lambda: None)
    assert tiny.with_adapters(None).adapters == tiny.kv_cache // 4


def test_adapters_that_leave_nothing_for_k_and_v_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"adapters 2\.0 GiB, K/V -1\.1 GiB; lower max_batch_tokens, lora_memory or"):
        gpu_kv_memory(loaded, StandIn(GIB, 1000), 1, 50, 6, None, AdapterWish(2 * GIB))


@pytest.mark.parametrize(
    ("values", "wish"),
    [
        ({}, None),
        ({"lora_dirs": "/adapters"}, AdapterWish()),
        ({"lora": "a=/adapters/a"}, AdapterWish()),
        ({"lora_memory": "64MiB"}, AdapterWish(64 << 20)),
    ],
)
def test_a_worker_plans_for_the_adapters_of_its_settings(
    values: dict[str, str], wish: AdapterWish | None, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def planned(*arguments: Any) -> MemoryPlan:
        asked.append(arguments[-1])
        plan = MemoryPlan(10 * GIB, GIB, 0, 0, 80 * GIB)
        return plan if arguments[-1] is None else plan.with_adapters(arguments[-1].memory)

    monkeypatch.setattr(kv_memory, "gpu_kv_memory", planned)
    monkeypatch.setattr(step_limits, "most_tokens", lambda *_: 64)
    monkeypatch.setattr(step_limits, "most_rows", lambda *_: 4)
    settings = Settings(model="x", **values)  # type: ignore[arg-type]
    found = kv_memory.kv_memory(settings, replace(loaded, device=torch.device("cuda:0")), 1)
    assert asked == [wish]
    assert found.kv_cache + (found.adapters or 0) == 9 * GIB
    assert found.adapters == (None if wish is None else wish.memory or GIB)


def test_a_worker_that_cannot_start_says_who_holds_the_memory() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
    text, may_pass = explain_no_memory(StandIn(24 * GIB, 22 * GIB, GIB), error)
    assert "of 24.0 GiB it holds 22.0 GiB, and other processes and the driver 1.0 GiB" in text
    assert text.endswith("(CUDA out of memory. Tried to allocate 2 GiB.)")
    assert not may_pass
    assert explain_no_memory(StandIn(24 * GIB, GIB, 20 * GIB), error)[1]


def test_a_gpu_without_room_for_a_process_is_a_sentence_too() -> None:
    error = RuntimeError("CUDA error: out of memory\nSearch for cudaErrorMemoryAllocation")
    assert is_for_want_of_memory(error)
    text, may_pass = explain_no_memory(StandIn(0, 0), error)
    assert text.endswith("use another GPU (CUDA error: out of memory)")
    assert may_pass
    assert not is_for_want_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
