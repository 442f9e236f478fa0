"""Pipelines with language models or T5 alone as text encoders against diffusers' own, alone and among others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from interfaces import PaintingContext
from model_worker.pixels.load import load_painter
from shared.pixel_files import PixelFiles
from tests.model_worker.pixels.test_originals import SIZE, edit, judged, left_half, picture
from tests.model_worker.pixels.test_painter import CLOSE, alone, context
from tests.model_worker.pixels.tiny_pipelines import Reference, tiny_pipeline

KINDS = [
    "FluxKontextPipeline",
    "ZImagePipeline",
    "QwenImagePipeline",
    "PixArtAlphaPipeline",
    "PixArtSigmaPipeline",
    "SanaPipeline",
]
# Arguments of diffusers' call: the sizes are taken as they are.
OPTIONS: dict[str, dict[str, Any]] = {
    "FluxKontextPipeline": {"max_area": 32 * 64, "_auto_resize": False},
    "PixArtAlphaPipeline": {"use_resolution_binning": False},
    "PixArtSigmaPipeline": {"use_resolution_binning": False},
    "SanaPipeline": {"use_resolution_binning": False},
}


def expected(reference: Reference, wanted: PaintingContext, **more: Any) -> NDArray[np.float32]:
    kind = type(reference.pipe).__name__
    guidance = "true_cfg_scale" if kind == "QwenImagePipeline" else "guidance_scale"
    options: dict[str, Any] = {guidance: wanted.guidance_scale, **OPTIONS.get(kind, {}), **more}
    if wanted.negative_prompt is not None:
        options["negative_prompt"] = wanted.negative_prompt
    image = reference.image(
        wanted.prompt,
        int(wanted.seeds[0]),
        height=wanted.height,
        width=wanted.width,
        num_inference_steps=wanted.steps,
        **options,
    )
    return image.reshape(wanted.height, -1)


def together(painter: Any, contexts: list[PaintingContext]) -> dict[int, NDArray[np.float32]]:
    """Images that begin one pass after another."""
    images: dict[int, NDArray[np.float32]] = {}
    for row, each in enumerate(contexts):
        painter.begin(row, each)
        images.update(painter.advance(range(len(contexts))).images)
    while len(painter):
        images.update(painter.advance(range(len(contexts))).images)
    return images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_diffusers_own_alone_and_among_others(folder: Path, kind: str) -> None:
    path = tiny_pipeline(kind, folder / kind)
    files = PixelFiles.read(path)
    painter = load_painter(path)
    reference = Reference(kind, path)
    negative = "blue" if files.family.contrasts else None
    sides = {"height": 32, "width": 64}
    wanted = [
        context("a red train", 5, **sides),
        context("night", 6, negative_prompt=negative, guidance_scale=2.0, steps=3, **sides),
        context("a red train", 7, guidance_scale=1.0, steps=2, **sides),
    ]
    images = together(painter, wanted)
    for row, each in enumerate(wanted):
        image = expected(reference, each)
        assert image.std() > 0.01
        np.testing.assert_allclose(alone(painter, each), image, atol=CLOSE)
        np.testing.assert_allclose(images[row], image, atol=CLOSE)
    assert np.abs(images[0] - images[2]).max() > 10 * CLOSE


def test_kontext_looks_at_a_reference(folder: Path) -> None:
    kind = "FluxKontextPipeline"
    path = tiny_pipeline(kind, folder / "reference")
    painter = load_painter(path)
    reference = Reference(kind, path)
    wanted = [edit(5, 1.0), context("a red train", 5, height=SIZE[0], width=SIZE[1])]
    images = together(painter, wanted)
    area = {"max_area": SIZE[0] * SIZE[1]}
    image = expected(reference, wanted[0], image=Image.fromarray(picture()), **area)
    np.testing.assert_allclose(images[0], image, atol=CLOSE)
    np.testing.assert_allclose(images[1], expected(reference, wanted[1], **area), atol=CLOSE)
    assert np.abs(images[0] - images[1]).max() > 10 * CLOSE


@pytest.mark.parametrize("kind", ["ZImagePipeline", "QwenImagePipeline"])
def test_an_edit_is_diffusers_own(folder: Path, kind: str) -> None:
    path = tiny_pipeline(kind, folder / f"edits-{kind}")
    painter = load_painter(path)
    reference = Reference(kind, path)
    wanted = [edit(5, 0.5, guidance_scale=1.0), edit(7, 0.6, left_half(), steps=5, guidance_scale=1.0)]
    images = together(painter, wanted)
    for row, each in enumerate(wanted):
        np.testing.assert_allclose(images[row], judged(reference, each), atol=CLOSE)
