"""Images that begin with other images against diffusers' pipelines for them: image to image, and with masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, HeunDiscreteScheduler, LCMScheduler, PNDMScheduler
from numpy.typing import NDArray
from PIL import Image

from interfaces import PaintingContext
from model_worker.pixels.load import load_painter
from tests.model_worker.pixels.test_painter import CLOSE, KINDS, alone, context
from tests.model_worker.pixels.tiny_pipelines import Reference, tiny_pipeline

SIZE = (48, 32)


def picture(seed: int = 0) -> NDArray[np.uint8]:
    """Pixels u8[height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (*SIZE, 3), np.uint8)


def left_half() -> NDArray[np.uint8]:
    """A mask whose left half is painted anew."""
    mask = np.zeros(SIZE, np.uint8)
    mask[:, : SIZE[1] // 2] = 255
    return mask


def edit(seed: int, strength: float, mask: NDArray[np.uint8] | None = None, **options: Any) -> PaintingContext:
    original = picture().reshape(SIZE[0], -1)
    given = {"height": SIZE[0], "width": SIZE[1], "original": original, "mask": mask, "strength": strength}
    return context("a red train", seed, **(given | options))


def judged(reference: Reference, wanted: PaintingContext) -> NDArray[np.float32]:
    masked = wanted.mask is not None
    sizes = {"height": SIZE[0], "width": SIZE[1]}
    kind = type(reference.pipe).__name__
    # Two pipelines take the size of the image, which is the same.
    options: dict[str, Any] = {} if kind.startswith("StableDiffusion") and "3" not in kind and not masked else sizes
    if masked:
        options["mask_image"] = Image.fromarray(np.asarray(wanted.mask))
    if kind == "QwenImagePipeline":
        options["true_cfg_scale"] = wanted.guidance_scale
    image = reference.of_task("Inpaint" if masked else "Img2Img").image(
        wanted.prompt,
        int(wanted.seeds[0]),
        image=Image.fromarray(picture()),
        strength=wanted.strength,
        num_inference_steps=wanted.steps,
        guidance_scale=wanted.guidance_scale,
        negative_prompt=wanted.negative_prompt,
        **options,
    )
    return image.reshape(SIZE[0], -1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("originals")


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_is_diffusers_own_alone_and_among_others(folder: Path, kind: str) -> None:
    path = tiny_pipeline(kind, folder / kind)
    if kind == "StableDiffusion3Pipeline":
        # diffusers' pipeline for masks leaves the shift out at the end, and its others do not.
        config = path / "vae/config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"shift_factor": 0.0}))
    painter = load_painter(path)
    reference = Reference(kind, path)
    wanted = [
        edit(5, 0.5),
        edit(6, 1.0, steps=3, guidance_scale=1.0),
        edit(7, 0.6, left_half(), steps=6),
        edit(8, 1.0, left_half()),
    ]
    plain = context("a red train", 9, height=SIZE[0], width=SIZE[1])
    by_itself = alone(painter, plain)
    images: dict[int, NDArray[np.float32]] = {}
    for row, each in enumerate([*wanted, plain]):
        painter.begin(row, each)
        images.update(painter.advance(range(5)).images)
    while len(painter):
        images.update(painter.advance(range(5)).images)
    for row, each in enumerate(wanted):
        expected = judged(reference, each)
        np.testing.assert_allclose(alone(painter, each), expected, atol=CLOSE)
        np.testing.assert_allclose(images[row], expected, atol=CLOSE)
    np.testing.assert_allclose(images[4], by_itself, atol=CLOSE)
    # The original, its mask, and the strength all matter.
    assert np.abs(images[0] - images[1]).max() > 10 * CLOSE
    assert np.abs(images[2] - images[3]).max() > 10 * CLOSE


@pytest.mark.parametrize(
    ("scheduler", "unet"),
    [
        (PNDMScheduler(skip_prk_steps=True, steps_offset=1), {}),
        (HeunDiscreteScheduler(), {}),
        (EulerAncestralDiscreteScheduler(steps_offset=1), {}),
        (LCMScheduler(steps_offset=1), {"time_cond_proj_dim": 8}),
    ],
)
def test_every_kind_of_schedule_begins_in_its_middle(tmp_path: Path, scheduler: Any, unet: dict[str, Any]) -> None:
    path = tiny_pipeline(KINDS[0], tmp_path / "pipeline", scheduler=scheduler, **unet)
    painter = load_painter(path)
    reference = Reference(KINDS[0], path)
    for wanted in (edit(5, 0.6, steps=6), edit(6, 0.6, left_half(), steps=6)):
        np.testing.assert_allclose(alone(painter, wanted), judged(reference, wanted), atol=CLOSE)


def test_what_stays_is_the_originals_in_previews_and_at_the_end(folder: Path) -> None:
    painter = load_painter(tiny_pipeline(KINDS[0], folder / "preview"))
    painter.begin(0, edit(5, 1.0, left_half(), previews=1))
    canvas = painter._canvases[0]
    assert canvas.kept is not None
    stays = canvas.kept.mask[0, 0] == 0
    assert 0 < stays.sum() < stays.numel()
    for step in range(4):
        made = painter.advance([0])
        assert len(made.previews) == (step == 1)
        original = canvas.kept.latents[..., stays]
        torch.testing.assert_close(canvas.expected[..., stays], original)
        assert torch.equal(canvas.latents[..., stays], original) == (step == 3)


def test_a_strength_that_leaves_no_step_is_refused(folder: Path) -> None:
    painter = load_painter(tiny_pipeline(KINDS[0], folder / "weak"))
    with pytest.raises(ValueError, match=r"strength 0\.2 of 4 steps leaves none"):
        painter.begin(0, edit(5, 0.2))
