"""Steps with adapters are tried before K and V are laid out, with a stand-in for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from model_worker.adapters import slots
from model_worker.cuda.memory import GIB
from model_worker.execution.rehearsal import AdapterWish, gpu_kv_memory
from model_worker.loading.load import load_model
from model_worker.sampling.device_penalties import most_bytes
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.cuda.launches import counted_launches
from tests.model_worker.cuda.test_memory import StandIn
from tests.model_worker.tiny_models import tiny_model

need_triton()

from model_worker.cuda import adapter_kernel  # noqa: E402


class Widest(StandIn):
    """A GPU on which work takes what lies between the factors of an adapter. Kernels are not run."""

    # The rows whose vectors of tokens were changed, of each step.
    vectors: ClassVar[set[int]] = set()

    def peak_of(self, work: Callable[[], None]) -> int:
        sizes = [0]

        def taking(y: Tensor, x: Tensor, *rest: Any) -> None:
            sizes.append(len(x) * rest[-1] * 4)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter_kernel, "add_low_rank", taking)
            patch.setattr(adapter_kernel, "add_vectors", lambda y, *_: self.vectors.add(len(y)))
            work()
        return max(sizes)


def test_steps_with_adapters_are_rehearsed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kernels add them, with what recorded steps keep; and nothing of the trial stays."""
    path = tiny_model("llama", tmp_path_factory.getbasetemp(), num_hidden_layers=1)
    loaded = load_model(path, "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False)
    monkeypatch.setattr(Widest, "vectors", set())
    monkeypatch.setattr(slots, "unsupported", lambda *_: "")
    of_gpu = replace(loaded, attention_name="triton", has_kernels=True)
    before = [module for module in loaded.model.modules() if module._forward_hooks]
    with counted_launches(monkeypatch, run=False):
        alone, adapted, wished = (
            gpu_kv_memory(of_gpu, Widest(8 * GIB, 1000), 1, 20, 3, 40, wish)
            for wish in (None, AdapterWish(), AdapterWish(2 * GIB))
        )
    # Logits of 1 and 2 decode rows, and once those of a step with prompts; a step of 3 has its own.
    logits = (1 + 2 + 3) * loaded.vocab_size * 4
    counts = most_bytes(3, loaded.vocab_size)
    assert (alone.step, alone.recorded, alone.adapters) == (counts, logits, 0)
    assert (adapted.step, adapted.recorded) == (counts + 20 * 64 * 4, logits + 20 * 64 * 4)
    assert Widest.vectors == {20, 3, 1}, "steps of prompts, of all rows, and of few"
    assert adapted.adapters == GIB
    assert wished == replace(adapted, adapters=2 * GIB)
    assert [module for module in loaded.model.modules() if module._forward_hooks] == before
