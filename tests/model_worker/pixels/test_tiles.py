"""The bound of a VAE's memory: large images in tiles, none larger than the bound, against the same images whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from model_worker.pixels import tiles
from model_worker.pixels.load import load_painter
from model_worker.pixels.tiles import TILE_SIDE, tiled
from tests.model_worker.pixels.test_originals import edit
from tests.model_worker.pixels.test_painter import CLOSE, alone, context
from tests.model_worker.pixels.tiny_pipelines import tiny_pipeline

# A pipeline with each kind of VAE.
KINDS = ["StableDiffusionPipeline", "QwenImagePipeline", "SanaPipeline"]
# Of pixels between 0 and 1. Each tile is normalised by its own pixels, so it is not as the whole image is.
MOST_MEAN, MOST = 0.01, 0.1


def watched(module: Any, of_input: bool) -> list[int]:
    """The pixels of each image that a decoder makes, or that an encoder is given, as they come."""
    seen: list[int] = []

    def note(_: Any, given: tuple[Tensor, ...], made: Tensor) -> None:
        shape = (given[0] if of_input else made).shape
        seen.append(shape[-2] * shape[-1])

    module.register_forward_hook(note)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_image_is_decoded_in_tiles_and_looks_as_it_does_whole(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    painter = load_painter(tiny_pipeline(kind, tmp_path / "pipeline"))
    small, large = (context("a red train", 5, height=side, width=2 * side, steps=2) for side in (64, 128))
    plain, whole = alone(painter, small), alone(painter, large)
    seen = watched(painter.family.pipe.vae.decoder, of_input=False)
    monkeypatch.setattr(tiles, "TILE_SIDE", 96)
    in_tiles = alone(painter, large)
    assert len(seen) == 8
    assert max(seen) == 96 * 96
    assert whole.std() > 0.01
    distance = np.abs(in_tiles - whole)
    assert distance.mean() < MOST_MEAN
    assert distance.max() < MOST
    # The next image is small enough to be decoded whole.
    np.testing.assert_allclose(alone(painter, small), plain, atol=CLOSE)
    assert seen[8:] == [64 * 128]


def test_an_image_that_one_begins_with_is_encoded_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    painter = load_painter(tiny_pipeline(KINDS[0], tmp_path / "pipeline"))
    seen = watched(painter.family.pipe.vae.encoder, of_input=True)
    painter.begin(0, edit(5, 0.5))
    monkeypatch.setattr(tiles, "TILE_SIDE", 32)
    painter.begin(1, edit(5, 0.5))
    assert seen == [48 * 32, 32 * 32, 32 * 8, 24 * 32, 24 * 8]


@pytest.mark.parametrize("sample_size", [[32, 32], 8192])
def test_no_tile_is_larger_than_the_bound_whatever_the_vae_is_made_for(sample_size: Any) -> None:
    torch.manual_seed(0)
    vae: Any = AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=2,
        sample_size=sample_size,
        mid_block_add_attention=False,
    ).eval()
    made, given = watched(vae.decoder, of_input=False), watched(vae.encoder, of_input=True)
    with torch.inference_mode():
        for height, width, parts in ((1024, 1024, 1), (1032, 1024, 4)):
            latents = torch.randn(1, 4, height // 8, width // 8)
            decoded = tiled(vae, height, width).decode(latents, return_dict=False)[0]
            assert decoded.shape[2:] == (height, width)
            assert tiled(vae, height, width).encode(decoded).latent_dist.mean.shape == latents.shape
            for seen in (made, given):
                assert len(seen) == parts
                assert max(seen) <= TILE_SIDE**2
                seen.clear()
