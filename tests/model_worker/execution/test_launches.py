"""What surrounds a recorded step on a GPU: a few launches, counted on the CPU with kernels that are interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_worker.cuda.graphs import DecodeBuffers, DecodeGraphs
from model_worker.device_copy import upload_together
from model_worker.sampling.columns import Columns
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.cuda.launches import counted_launches
from tests.model_worker.execution.tiny_worker import BLOCK_SIZE, BLOCKS_PER_ROW, ROWS, TinyWorker, join
from tests.model_worker.test_runner import load
from tests.model_worker.tiny_models import tiny_model

need_triton()

PROMPT = [5, 9, 3]


def test_a_greedy_step_has_four_launches_around_its_recording(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns go to the device in one copy, and a step whose tokens are not read yet has no more of either."""
    path = tiny_model("llama", tmp_path_factory.getbasetemp(), num_hidden_layers=1)
    loaded = replace(load(path), stack=None, attention_name="triton")
    worker, plain = TinyWorker(loaded, "cuda"), TinyWorker(loaded)
    worker.shared.sampler.use_columns(Columns(kernels=True))
    for each in (worker, plain):
        each.prefill(join(0, PROMPT), join(1, PROMPT[:2]))
    copies = []

    def counted(*arguments: object) -> list[Tensor]:
        copies.append(arguments)
        return upload_together(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("model_worker.batch.upload_together", counted)
    names: list[str] = []

    def recorder(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A replay is one launch."""

        def replay() -> Tensor:
            before = len(names)
            logits = function()
            names[before:] = ["replay"]
            return logits

        return replay

    places = BLOCKS_PER_ROW, BLOCK_SIZE, ROWS * BLOCKS_PER_ROW, torch.device("cpu"), True
    worker.backend._graphs = DecodeGraphs(worker.backend._forward, DecodeBuffers(ROWS, *places), recorder)
    launched = []
    with counted_launches(monkeypatch) as launches:
        launches.names = names
        launched = [worker.begin([0, 1]) for _ in range(2)]
    assert worker.taken == ["OverlapCuda"] * 2
    assert names == ["fill_decode_kernel", "replay", "aten::max", "finish_kernel", "keep_kernel"] * 2
    assert len(copies) == 2
    for pending in launched:
        assert pending.result().tokens.tolist() == plain.begin([0, 1]).result().tokens.tolist()
