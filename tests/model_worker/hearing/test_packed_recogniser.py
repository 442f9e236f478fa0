"""A recogniser's products are packed on a CPU, and its encoder may take more cores in the middle of a clip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from interfaces import ImageMetadata
from model_worker.cpu import kernel_cache
from model_worker.cpu.gemm.half_linear import HalfLinear
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cpu.gemm.panel_linear import PanelLinear
from model_worker.cpu.simd.dot_bf16 import HAS_HALVES
from model_worker.hearing.encoder import ClipEncoder
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from shared.recogniser_files import clip_tokens
from tests.model_worker.hearing.tiny_whisper import POSITIONS, features, speech, tiny_whisper
from tests.system.in_process import load


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    # It has buffers for as many cores as torch has now.
    cores = torch.get_num_threads()
    torch.set_num_threads(max(2, cores))
    try:
        yield load(tiny_whisper(tmp_path_factory.mktemp("whisper")), dtype=request.param)
    finally:
        torch.set_num_threads(cores)


def test_every_product_is_packed(loaded: LoadedModel) -> None:
    model: Any = loaded.model
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linears == {}
    assert isinstance(model.proj_out, PanelLinear)
    # The table of embeddings stays beside the copy that multiplies.
    embeddings = model.get_input_embeddings().weight
    torch.testing.assert_close(model.proj_out.weight, embeddings)
    assert loaded.parameter_bytes == loaded.parameter_count * embeddings.itemsize + embeddings.nbytes


@pytest.mark.skipif(not HAS_HALVES, reason="this CPU does not widen float16")
@pytest.mark.parametrize("missing", [kernel_cache.ENCODER, kernel_cache.HALVES])
def test_kernels_that_are_compiled_are_used_before_the_others(tmp_path: Path, missing: str) -> None:
    folder = tiny_whisper(tmp_path)
    weights = load_file(folder / "model.safetensors")
    halves = {name: weight.half().float() for name, weight in weights.items()}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})

    def has_kernels(_: torch.dtype, family: str) -> bool:
        return missing not in kernel_cache.parts_of(family)

    found = load_model(folder, "float32", "cpu", lambda *_: None, has_kernels=has_kernels)
    assert found.has_kernels
    assert found.awaits_kernels
    assert isinstance(found.encoder, ClipEncoder)
    assert bool(found.encoder.compiled) == (missing != kernel_cache.ENCODER)
    model: Any = found.model
    assert type(model.proj_out) is (PackedLinear if missing == kernel_cache.HALVES else HalfLinear)


def test_a_clip_has_the_same_bits_with_any_number_of_cores(loaded: LoadedModel) -> None:
    encoder = loaded.encoder
    assert encoder is not None
    assert encoder.bits_are_fixed
    mel = features(speech(3, 0.9))
    clip = ImageMetadata(start_idx=0, end_idx=clip_tokens(POSITIONS), pixel_values=mel)
    found = []
    cores = torch.get_num_threads()
    try:
        for count in (1, max(2, cores)):
            torch.set_num_threads(count)
            found.append(encoder.encode(clip))
    finally:
        torch.set_num_threads(cores)
    np.testing.assert_array_equal(found[0], found[1])


def test_products_whose_bits_depend_on_the_cores_keep_their_number(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(loaded.encoder, ClipEncoder)
    encoder = replace(loaded.encoder, compiled=())
    layer: Any = encoder.composite.model.encoder.layers[0]
    usual = layer.forward

    def shaky(states: torch.Tensor, *arguments: Any) -> torch.Tensor:
        found: torch.Tensor = usual(states, *arguments)
        return found + torch.get_num_threads()

    monkeypatch.setattr(layer, "forward", shaky)
    monkeypatch.setattr(torch, "get_num_threads", _count_of(monkeypatch))
    assert not encoder.bits_are_fixed


def _count_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A count of threads that is what was set last, also on a machine of one core."""
    last = [2]
    monkeypatch.setattr(torch, "set_num_threads", lambda count: last.__setitem__(0, count))
    return lambda: last[0]
