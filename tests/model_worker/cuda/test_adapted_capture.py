"""Recorded steps with adapters wait for nothing, copy nothing from the host, and launch so many kernels.

On fake CUDA tensors (fake_gpu.py), where nothing has an address. All linear modules and the embedding are adapted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_worker.adapters import slots
from model_worker.adapters.blank import blank_adapter
from model_worker.adapters.fitting import AdaptedEmbedding
from model_worker.cuda.adapted_graphs import AdaptedGraphs
from model_worker.cuda.graphs import DecodeBuffers, DecodeGraphs
from model_worker.cuda.mixed_graphs import MixedBuffers, MixedGraphs
from model_worker.runner import ModelRunner
from tests.model_worker.cuda.fake_gpu import DEVICE, fake_gpu, moved
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.cuda.launches import Launches, counted_launches
from tests.model_worker.cuda.test_capture import LAYERS, MOST_OF_A_FUSED_LAYER, ROWS, load
from tests.model_worker.tiny_models import VOCAB

need_triton()

RANK = 8
TOKENS = 64
# The linear modules of a layer that are adapted; of Mixtral the experts are not.
FUSED = {"llama": 7, "qwen3": 7}
MODULES = {"gpt2": 4, "mixtral": 4}
# Copies of logits and of the slots of those that are wanted; of prompts also the slots of tokens.
MORE, MORE_OF_PROMPTS = 4, 10


def unrecorded(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return step


def launched(
    family: str, folder: Path, monkeypatch: pytest.MonkeyPatch, layers: int = LAYERS
) -> tuple[list[Launches], list[Launches]]:
    """Launch a decode step and one with prompts, as they are recorded: plain ones, and those with adapters."""
    loaded = load(family, folder, layers)
    with monkeypatch.context() as patch, fake_gpu(monkeypatch):
        patch.setattr(torch.Tensor, "data_ptr", lambda _: 0)
        patch.setattr(slots, "unsupported", lambda *_: "")
        on_gpu = moved(loaded, torch.bfloat16)
        backend: Any = ModelRunner(on_gpu, 8, 16).backend
        adapter = blank_adapter(on_gpu.model, RANK, DEVICE, torch.bfloat16)
        vectors = torch.zeros(VOCAB, RANK, device=DEVICE, dtype=torch.bfloat16)
        embedding: Any = on_gpu.model.get_input_embeddings()
        hidden = embedding.weight.shape[1]
        b = torch.zeros(RANK, hidden, device=DEVICE, dtype=torch.bfloat16).T
        backend.add_adapter(1, replace(adapter, embedding=AdaptedEmbedding(vectors, b, 1.0)))
        places = 4, 16, 8, DEVICE
        decode, mixed = DecodeBuffers(ROWS, *places), MixedBuffers(TOKENS, ROWS, *places)
        with counted_launches(monkeypatch, run=False):
            graphs = (
                DecodeGraphs(backend._forward, decode, unrecorded),
                MixedGraphs(backend._forward, mixed, unrecorded),
            )
            adapted = AdaptedGraphs(*graphs, backend._in_slots, unrecorded)
        plain, with_adapters = [], []
        for batch, decodes in ((decode.batch(ROWS), True), (mixed.batch(TOKENS), False)):
            with counted_launches(monkeypatch, run=False) as launches:
                backend._forward(batch)
            plain.append(launches)
            with counted_launches(monkeypatch, run=False) as launches:
                logits = adapted._placed(batch, decodes)
            assert (logits.shape, logits.device) == ((ROWS, loaded.vocab_size), DEVICE)
            with_adapters.append(launches)
    return plain, with_adapters


@pytest.mark.parametrize(("family", "modules"), [*FUSED.items(), *MODULES.items()])
def test_a_recorded_step_with_adapters_waits_for_nothing(
    family: str, modules: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, adapted = launched(family, tmp_path_factory.getbasetemp(), monkeypatch)
    for before, launches, more in zip(plain, adapted, (MORE, MORE_OF_PROMPTS), strict=True):
        assert not launches.wide_doubles
        assert not launches.from_host
        counts = Counter(launches.names)
        # Of each layer, and of the head; vectors of tokens have no A to be multiplied with.
        products = LAYERS * modules + 1
        assert (counts["shrink_kernel"], counts["expand_kernel"], counts["gather_kernel"]) == (
            products,
            products + 1,
            1,
        )
        assert len(launches.names) <= len(before.names) + 2 * (products + 1) + more, counts - Counter(before.names)


@pytest.mark.parametrize("family", FUSED)
def test_launches_of_a_fused_layer_with_adapters(
    family: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two more for each of its modules."""
    two, three = (launched(family, tmp_path_factory.getbasetemp(), monkeypatch, n)[1][0] for n in (2, 3))
    of_layer = Counter(three.names) - Counter(two.names)
    assert of_layer.total() <= MOST_OF_A_FUSED_LAYER + 2 * FUSED[family], of_layer
