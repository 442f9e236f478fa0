"""Images that another painter goes on with from a kept step: their pixels are those of images that nobody lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)
from numpy.typing import NDArray

from interfaces import PaintingContext
from model_worker.pixels import kept_step, painter
from model_worker.pixels.kept_step import restore
from model_worker.pixels.load import load_painter
from model_worker.pixels.painter import KeptImage, Painter
from tests.model_worker.pixels.test_originals import edit, left_half
from tests.model_worker.pixels.test_painter import CLOSE, alone, context
from tests.model_worker.pixels.tiny_pipelines import tiny_pipeline

KINDS = [
    "StableDiffusionXLPipeline",
    "StableDiffusion3Pipeline",
    "FluxPipeline",
    "ZImagePipeline",
    "QwenImagePipeline",
    "PixArtSigmaPipeline",
]
SCHEDULES = [
    PNDMScheduler(skip_prk_steps=True, steps_offset=1),
    HeunDiscreteScheduler(),
    EulerAncestralDiscreteScheduler(steps_offset=1),
    LCMScheduler(steps_offset=1),
    DPMSolverMultistepScheduler(),
    UniPCMultistepScheduler(),
]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is kept."""
    monkeypatch.setattr(painter, "SECONDS_BETWEEN_KEPT", 0.0)


def kept_at(first: Painter, wanted: PaintingContext, taken: int) -> KeptImage:
    first.begin(0, wanted)
    for _ in range(taken):
        made = first.advance([0])
    first.forget()
    (kept,) = made.kept
    assert (kept.row, kept.taken) == (0, taken)
    return kept


def ended(second: Painter, wanted: PaintingContext, kept: KeptImage) -> tuple[NDArray[np.float32], int]:
    """The image of a painter that goes on, and the passes that it took."""
    total = second.begin(3, wanted, kept.state)
    for passes in range(1, total + 1):
        if images := second.advance([3]).images:
            return images[3], passes
    raise AssertionError("the image has no end")


def check(path: Path, wanted: PaintingContext) -> None:
    first, second = load_painter(path), load_painter(path)
    whole = alone(first, wanted)
    passes = first.begin(0, wanted)
    first.forget()
    for taken in (1, passes - 1):
        image, rest = ended(second, wanted, kept_at(first, wanted, taken))
        assert rest == passes - taken
        np.testing.assert_allclose(image, whole, atol=CLOSE)
    other, _ = ended(second, wanted, kept_at(first, context("night", 9, height=wanted.height, width=wanted.width), 1))
    assert np.abs(other - whole).max() > 10 * CLOSE


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_each_family_goes_on(tmp_path: Path, kind: str) -> None:
    check(tiny_pipeline(kind, tmp_path / "pipeline"), context("a red train", 5, width=64))


@pytest.mark.parametrize("scheduler", SCHEDULES, ids=lambda scheduler: type(scheduler).__name__)
def test_an_image_goes_on_with_what_its_schedule_remembers(tmp_path: Path, scheduler: Any) -> None:
    check(tiny_pipeline("StableDiffusionPipeline", tmp_path / "pipeline", scheduler=scheduler), context("a train", 5))


def test_an_image_of_which_a_part_stays_goes_on(tmp_path: Path) -> None:
    path = tiny_pipeline("StableDiffusionPipeline", tmp_path / "pipeline")
    wanted = edit(5, 0.8, left_half(), steps=6)
    first, second = load_painter(path), load_painter(path)
    image, _ = ended(second, wanted, kept_at(first, wanted, 2))
    np.testing.assert_allclose(image, alone(first, wanted), atol=CLOSE)


def test_an_image_is_kept_after_a_while_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_painter(tiny_pipeline("StableDiffusionPipeline", tmp_path / "pipeline"))
    monkeypatch.setattr(painter, "SECONDS_BETWEEN_KEPT", 1000.0)
    made.begin(0, context("a train", 5))
    assert made.advance([0]).kept == []
    made._canvases[0].kept_at -= 1000
    (kept,) = made.advance([0]).kept
    assert kept.taken == 2
    assert made.advance([0]).kept == []
    made.begin(1, context("a train", 5, previews=1))
    # With a preview it is kept, too.
    assert [[kept.taken for kept in made.advance([1]).kept] for _ in range(4)] == [[], [2], [], []]
    # An image that is done is an image.
    made._canvases[0].kept_at -= 1000
    assert made.advance([0]).kept == []


def test_an_image_that_is_too_large_or_no_data_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_painter(tiny_pipeline("StableDiffusionPipeline", tmp_path / "pipeline"))
    made.begin(0, context("a train", 5))
    made._canvases[0].scheduler.noise_sampler = object()
    assert made.advance([0]).kept == []
    del made._canvases[0].scheduler.noise_sampler
    monkeypatch.setattr(kept_step, "MOST_BYTES", 1000)
    assert made.advance([0]).kept == []


def test_what_is_no_kept_step_of_this_image_is_refused(tmp_path: Path) -> None:
    made = load_painter(tiny_pipeline("StableDiffusionPipeline", tmp_path / "pipeline"))
    wanted = context("a train", 5)
    state = kept_at(made, wanted, 2).state
    tensors = safetensors.torch.load(state)
    for wrong in (
        b"\x80\x04K\x01.",
        state[:-1],
        safetensors.torch.save({"a": torch.zeros(1)}),
        safetensors.torch.save(tensors | {"text": torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8)}),
    ):
        made.begin(1, wanted)
        with pytest.raises(ValueError, match="the kept step cannot be read"):
            restore(made._canvases[1], wrong)
        made.forget()
        # The image begins again.
        image, passes = ended(made, wanted, KeptImage(0, 2, wrong))
        assert passes == 4
        np.testing.assert_array_equal(image, alone(made, wanted))
    for other in (context("a train", 5, width=64), context("a train", 5, steps=2)):
        made.begin(1, other)
        with pytest.raises(ValueError, match="it belongs to another image"):
            restore(made._canvases[1], state)
