"""LoRA adapters of pipelines that paint against diffusers' own loader: alone, and among images without them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from model_worker.model import ModelRefused
from model_worker.pixels.load import load_painter
from shared.pixel_adapters import WEIGHTS_FILE, digests
from tests.model_worker.pixels.test_painter import CLOSE, alone, context, expected
from tests.model_worker.pixels.tiny_pipelines import Reference, tiny_pipeline


def saved_adapter(kind: str, path: Path, folder: Path, seed: int) -> Path:
    """Save a random adapter of a pipeline's denoiser."""
    torch.manual_seed(seed)
    pipe = Reference(kind, path).pipe
    name = "unet" if hasattr(pipe, "unet") else "transformer"
    module = getattr(pipe, name)
    module.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    with torch.no_grad():
        for weight_name, weight in module.named_parameters():
            if "lora_" in weight_name:
                weight.normal_(std=0.5)
    pipe.save_lora_weights(folder, **{f"{name}_lora_layers": get_peft_model_state_dict(module)})
    return folder


@pytest.mark.parametrize("kind", ["StableDiffusionPipeline", "FluxPipeline"])
def test_images_of_different_adapters_are_diffusers_own(tmp_path: Path, kind: str) -> None:
    path = tiny_pipeline(kind, tmp_path / "pipeline")
    folders = {name: str(saved_adapter(kind, path, tmp_path / name, i)) for i, name in enumerate(("sea", "snow"))}
    # The same content under another name is not loaded twice.
    shutil.copytree(folders["sea"], tmp_path / "again")
    painter = load_painter(path, adapters=folders | {"again": str(tmp_path / "again")})
    known = digests(folders)
    assert len(set(known.values())) == 2
    plain = context("a red train", 5)
    wanted = [
        plain,
        context("a red train", 5, lora=known["sea"]),
        context("a red train", 5, lora=known["snow"], lora_scale=0.5),
        context("night", 6, lora=known["sea"], steps=3),
        context("a red train", 7, steps=5),
    ]
    uses: list[tuple[str | None, float]] = [(None, 1.0), ("sea", 1.0), ("snow", 0.5), ("sea", 1.0), (None, 1.0)]
    images: dict[int, NDArray[np.float32]] = {}
    for row, each in enumerate(wanted):
        painter.begin(row, each)
        images.update(painter.advance(range(5)).images)
    while len(painter):
        images.update(painter.advance(range(5)).images)
    reference = Reference(kind, path)
    np.testing.assert_allclose(alone(painter, plain), expected(reference, plain), atol=CLOSE)
    for name, folder in folders.items():
        reference.pipe.load_lora_weights(folder, adapter_name=name)
    for row, (used, scale) in enumerate(uses):
        if used is None:
            reference.pipe.disable_lora()
        else:
            reference.pipe.enable_lora()
            reference.pipe.set_adapters([used], [scale])
        np.testing.assert_allclose(images[row], expected(reference, wanted[row]), atol=CLOSE)
    assert min(np.abs(images[0] - images[row]).max() for row in (1, 2)) > 10 * CLOSE


def test_adapters_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    kind = "StableDiffusionPipeline"
    path = tiny_pipeline(kind, tmp_path / "pipeline")
    with pytest.raises(ModelRefused, match=f"lora sea=.*it has no {WEIGHTS_FILE}"):
        load_painter(path, adapters={"sea": str(tmp_path)})
    (tmp_path / WEIGHTS_FILE).write_bytes(b"no tensors")
    with pytest.raises(ModelRefused, match="lora sea="):
        load_painter(path, adapters={"sea": str(tmp_path)})
    foreign = {"transformer.blocks.0.to_q.lora_A.weight": torch.ones(2, 4)}
    foreign |= {"transformer.blocks.0.to_q.lora_B.weight": torch.ones(4, 2)}
    save_file(foreign, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ModelRefused, match=r"lora sea=.*none of its weights is for this pipeline"):
        load_painter(path, adapters={"sea": str(tmp_path)})
    painter = load_painter(path)
    with pytest.raises(ValueError, match="the adapter's file has changed since this worker started"):
        painter.begin(0, context("a train", 5, lora="0" * 32))
