"""Adapters on the modules of mixers, which compute the rows of a pass in groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model_worker.backends import modules
from model_worker.batch import ForwardBatch
from model_worker.runner import ModelRunner
from tests.model_worker.adapters.made import Recipe, make
from tests.model_worker.adapters.test_slots import BLOCK as GPU_BLOCK_SIZE
from tests.model_worker.adapters.test_slots import loaded_model
from tests.model_worker.execution.test_gpu_branch import Replays
from tests.model_worker.recurrent.tiny_hybrids import tiny_hybrid
from tests.model_worker.test_runner import BLOCK_SIZE, load
from tests.model_worker.tiny_models import VOCAB

TARGETS = ("in_proj_qkv", "in_proj_a", "out_proj", "q_proj", "down_proj")
BLOCKS = 3
# Prompts of several tokens and of one, with two adapters and none. The last tokens of all come in one pass.
LENGTHS = (5, 1, 3, 9)
HANDLES = (1, 2, 0, 2)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_rows_of_a_pass_have_their_own_adapters(
    device: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, too: kernels add adapters, and the pass over single tokens is recorded."""
    layers = ["linear_attention", "full_attention"]
    path = tiny_hybrid("qwen3_5_text", tmp_path_factory.getbasetemp(), num_hidden_layers=2, layer_types=layers)
    replays = Replays()
    monkeypatch.setattr(modules, "CudaRecorder", lambda: replays)
    loaded = load(path) if device == "cpu" else loaded_model(path, fuses=False)
    runner = ModelRunner(loaded, BLOCKS * len(LENGTHS), BLOCK_SIZE if device == "cpu" else GPU_BLOCK_SIZE)
    runner.record(len(LENGTHS), BLOCKS * GPU_BLOCK_SIZE, 0)
    assert runner.records == (device == "gpu")
    replays.counts.clear()
    backend = runner.backend
    models = {0: make(path, tmp_path / "0", Recipe(targets=()), seed=0).merged}
    for handle in (1, 2):
        made = make(path, tmp_path / str(handle), Recipe(targets=TARGETS), seed=handle)
        backend.load_adapter(handle, str(made.folder))
        models[handle] = made.merged
    rng = np.random.default_rng()
    texts = [rng.integers(3, VOCAB, length + 1) for length in LENGTHS]

    def logits(firsts: list[int], ends: list[int]) -> torch.Tensor:
        chunks = [text[first:end] for text, first, end in zip(texts, firsts, ends, strict=True)]
        lengths = np.array([len(chunk) for chunk in chunks])
        rows = np.arange(len(texts))
        blocks = np.arange(BLOCKS)[None] + BLOCKS * rows[:, None]
        shape = blocks, runner.cache.block_size, np.cumsum(lengths) - 1
        handles = np.array(HANDLES, np.int32)
        batch = ForwardBatch.build(np.concatenate(chunks), lengths, np.array(ends), *shape, adapters=handles, rows=rows)
        return backend.logits(batch)

    prompts = logits([0] * len(texts), list(LENGTHS)).clone()
    single = logits(list(LENGTHS), [len(text) for text in texts])
    assert replays.counts.total() == (device == "gpu")
    for i, (text, handle) in enumerate(zip(texts, HANDLES, strict=True)):
        with torch.inference_mode():
            want = models[handle](input_ids=torch.from_numpy(text)[None]).logits[0]
        torch.testing.assert_close(prompts[i], want[-2], rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(single[i], want[-1], rtol=2e-4, atol=2e-4)
