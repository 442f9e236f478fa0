"""Images of the painter against diffusers' own pipelines: alone, and among others that join and leave at any step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    StableDiffusionXLPipeline,
)
from numpy.typing import NDArray

from interfaces import PaintingContext, PixelJoin, PixelStep, PoolingTask
from model_worker.model import ModelRefused
from model_worker.pixels.family import Size
from model_worker.pixels.load import load_painter
from model_worker.pixels.painter import KEPT_DESCRIPTIONS, Painter, _due
from model_worker.pixels.runner import PixelRunner
from model_worker.pixels.unets import StableDiffusionXL
from shared.pixel_files import PixelFiles
from tests.model_worker.pixels.tiny_pipelines import Reference, tiny_pipeline

KINDS = ["StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "FluxPipeline"]
# Of pixels between 0 and 1: a hundredth of what a byte can show. Sums in float32 differ by a thousandth of it.
CLOSE = 1 / 255 / 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


def saved(folder: Path, kind: str) -> Path:
    path = folder / kind
    return path if path.exists() else tiny_pipeline(kind, path)


def context(prompt: str, seed: int, **options: Any) -> PaintingContext:
    given: dict[str, Any] = {"height": 32, "width": 32, "steps": 4, "guidance_scale": 5.0}
    seeds = np.array([seed])
    return PaintingContext.of([[0, 1]], PoolingTask.PAINT, seeds=seeds, prompt=prompt, **(given | options))


def expected(reference: Reference, wanted: PaintingContext) -> NDArray[np.float32]:
    image = reference.image(
        wanted.prompt,
        int(wanted.seeds[0]),
        height=wanted.height,
        width=wanted.width,
        num_inference_steps=wanted.steps,
        guidance_scale=wanted.guidance_scale,
        negative_prompt=wanted.negative_prompt,
    )
    return image.reshape(wanted.height, -1)


def alone(painter: Painter, wanted: PaintingContext) -> NDArray[np.float32]:
    painter.begin(0, wanted)
    while True:
        made = painter.advance([0])
        if made.images:
            return made.images[0]
        assert not made.errors


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_diffusers_own(folder: Path, kind: str) -> None:
    path = saved(folder, kind)
    painter = load_painter(path)
    reference = Reference(kind, path)
    for wanted in (
        context("a red train", 5),
        context("a red train", 6, negative_prompt="blue", guidance_scale=2.0),
        context("", 7, guidance_scale=1.0, width=48),
    ):
        image = expected(reference, wanted)
        assert image.std() > 0.05
        np.testing.assert_allclose(alone(painter, wanted), image, atol=CLOSE)
    words = [alone(painter, context(prompt, 5)) for prompt in ("a red train", "night")]
    assert np.abs(words[0] - words[1]).max() > 10 * CLOSE


@pytest.mark.parametrize("kind", KINDS)
def test_images_join_and_leave_at_any_step_and_stay_as_they_are(folder: Path, kind: str) -> None:
    painter = load_painter(saved(folder, kind))
    wanted = [
        context(
            random.choice(["a train", "the bridge in the rain", "night"]),
            random.randrange(2**62),
            steps=random.randint(1, 5),
            width=random.choice([32, 32, 48]),
            guidance_scale=random.choice([1.0, 3.0, 7.5]),
            negative_prompt=random.choice([None, "blue"]),
        )
        for _ in range(6)
    ]
    waiting = list(enumerate(wanted))
    left = set()
    images: dict[int, NDArray[np.float32]] = {}
    while waiting or len(painter):
        for _ in range(random.randint(0 if len(painter) else 1, 3)):
            if waiting:
                painter.begin(*waiting.pop())
        if random.random() < 0.2 and (rows := [row for row in range(6) if row in painter]):
            left.add(rows[0])
            painter.drop(rows[:1])
        images.update(painter.advance(range(6)).images)
    assert sorted(images) == sorted({*range(6)} - left)
    for row, image in images.items():
        np.testing.assert_allclose(image, alone(painter, wanted[row]), atol=CLOSE)


@pytest.mark.parametrize(
    ("scheduler", "unet"),
    [
        (PNDMScheduler(skip_prk_steps=True, steps_offset=1), {}),
        (HeunDiscreteScheduler(), {}),
        (EulerAncestralDiscreteScheduler(steps_offset=1), {}),
        (EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1), {}),
        (EulerAncestralDiscreteScheduler(timestep_spacing="leading", steps_offset=1), {}),
        (LCMScheduler(steps_offset=1), {"time_cond_proj_dim": 8}),
    ],
)
def test_every_kind_of_schedule(tmp_path: Path, scheduler: Any, unet: dict[str, Any]) -> None:
    """Some take more passes than steps, keep what was predicted before, or draw noise in each step.

    With the spacing `leading`, which SDXL has, the number of steps says how strong the first noise is.
    """
    path = tiny_pipeline(KINDS[0], tmp_path / "pipeline", scheduler=scheduler, **unet)
    painter = load_painter(path)
    reference = Reference(KINDS[0], path)
    first, second = context("a train", 11, steps=5), context("rain", 12)
    painter.begin(1, first)
    images = painter.advance([1]).images
    painter.begin(2, second)
    while len(painter):
        images.update(painter.advance([1, 2]).images)
    for row, wanted in ((1, first), (2, second)):
        np.testing.assert_allclose(images[row], expected(reference, wanted), atol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_previews_are_what_the_image_is_expected_to_become(tmp_path: Path, kind: str) -> None:
    scheduler = EulerDiscreteScheduler(steps_offset=1) if "3" not in kind and kind != "FluxPipeline" else None
    painter = load_painter(tiny_pipeline(kind, tmp_path / "pipeline", scheduler=scheduler))
    wanted = context("a train", 5, steps=6)
    plain = alone(painter, wanted)
    painter.begin(0, replace(wanted, previews=2))
    made = [painter.advance([0]) for _ in range(5)]
    assert [[(one.row, one.number) for one in each.previews] for each in made] == [[], [(0, 1)], [], [(0, 2)], []]
    first, second = (one.pixels for each in made for one in each.previews)
    assert first.shape == second.shape == plain.shape
    assert np.abs(first - second).max() > 10 * CLOSE
    assert min(first.min(), second.min()) >= 0
    canvas = painter._canvases[0]
    last = painter.advance([0])
    assert not last.previews
    np.testing.assert_allclose(last.images[0], plain, atol=CLOSE)
    # With these schedules nothing is left to be expected after the last step.
    torch.testing.assert_close(canvas.expected, canvas.latents, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("passes", "previews", "due"), [(6, 2, [2, 4]), (2, 3, [1]), (1, 3, []), (50, 3, [12, 25, 38])]
)
def test_previews_are_spread_evenly(passes: int, previews: int, due: list[int]) -> None:
    assert _due(passes, previews) == due


def test_images_that_the_denoiser_refuses_fail_and_no_others(folder: Path) -> None:
    """A side of 132 pixels has 33 patches, and the model knows 32 places."""
    painter = load_painter(saved(folder, KINDS[2]))
    good = context("a train", 5, width=128)
    plain = alone(painter, good)
    painter.begin(1, good)
    images = painter.advance([1]).images
    for row in (2, 3):
        painter.begin(row, context("a train", row, width=132))
    made = painter.advance([1, 2, 3])
    assert sorted(made.errors) == [2, 3]
    assert "33" in made.errors[2]
    assert len(painter) == 1
    while len(painter):
        images.update(painter.advance([1, 2, 3]).images)
    np.testing.assert_allclose(images[1], plain, atol=CLOSE)


def test_an_image_that_fails_in_a_shared_pass_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    painter = load_painter(saved(folder, KINDS[0]))
    good = context("a train", 5)
    plain = alone(painter, good)
    painter.begin(1, good)
    painter.begin(2, context("night", 6))

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("the schedule has no such step")

    monkeypatch.setattr(painter._canvases[2].scheduler, "step", refuse)
    made = painter.advance([2, 1])
    assert made.errors == {2: "the schedule has no such step"}
    images = made.images
    while len(painter):
        images.update(painter.advance([1]).images)
    np.testing.assert_allclose(images[1], plain, atol=CLOSE)


def test_encoded_texts_are_kept_and_bounded(folder: Path) -> None:
    painter = load_painter(saved(folder, KINDS[0]))
    encoded: list[Any] = []
    painter.family.pipe.text_encoder.register_forward_hook(lambda *_: encoded.append(1))
    for seed in range(3):
        painter.begin(seed, context("a train", seed))
    assert len(encoded) == 2  # the description, and what it is contrasted with
    for i in range(KEPT_DESCRIPTIONS + 3):
        painter.begin(10 + i, context(f"train {chr(97 + i)}", i, guidance_scale=1.0))
    assert len(painter._descriptions) == KEPT_DESCRIPTIONS


def runner_of(folder: Path) -> PixelRunner:
    return PixelRunner(load_painter(saved(folder, KINDS[0])), 3, 4)


def step(number: int, rows: list[int], joins: list[PixelJoin], incarnation: int = 1, drop: tuple[int, ...] = ()) -> Any:
    return PixelStep(incarnation, 4, number, np.array(rows, np.int32), np.array(drop, np.int32), joins)


def test_the_runner_answers_each_pass_and_a_wrong_image_fails_alone(folder: Path) -> None:
    runner = runner_of(folder)
    good = PixelJoin(1, context("a train", 5, steps=2))
    result = runner.run(step(1, [1, 2], [good, PixelJoin(2, context("a train", 5, height=20))]))
    assert (result.incarnation, result.epoch, result.index, result.number) == (1, 4, 3, 1)
    assert result.passes.tolist() == [2, 0]
    assert result.errors == {2: "height and width must be multiples of 8, got 20"}
    assert not result.images
    result = runner.run(step(2, [1], []))
    assert result.finished.tolist() == [1]
    assert result.images[0].values.shape == (32, 96)
    # The next pass was sent before this one's result came.
    assert not runner.run(step(3, [1], [])).errors


def test_the_runner_drops_images_and_forgets_those_of_an_earlier_scheduler(folder: Path) -> None:
    runner = runner_of(folder)
    runner.run(step(1, [1, 2], [PixelJoin(row, context("a train", row)) for row in (1, 2)]))
    runner.run(step(2, [2], [], drop=(1,)))
    assert 1 not in runner._painter
    runner.run(step(1, [3], [PixelJoin(3, context("a train", 3))], incarnation=2))
    assert 2 not in runner._painter
    assert 3 in runner._painter


@pytest.mark.parametrize("force_upcast", [True, False])
def test_the_vae_of_xl_in_float16_computes_in_float32(tmp_path: Path, force_upcast: bool) -> None:
    path = tiny_pipeline(KINDS[1], tmp_path / "pipeline")
    pipe = StableDiffusionXLPipeline.from_pretrained(path, dtype=torch.float16, add_watermarker=False)
    pipe.vae.register_to_config(force_upcast=force_upcast)
    family = StableDiffusionXL(pipe, torch.device("cpu"))
    assert family.dtype == torch.float16
    assert pipe.vae.dtype == (torch.float32 if force_upcast else torch.float16)
    if force_upcast:
        latents = torch.zeros(1, 4, 16, 16, dtype=torch.float16)
        assert family.pixels(latents, Size(32, 32)).isfinite().all()


@pytest.mark.parametrize("steps", [40, 41])
def test_a_distilled_schedule_has_as_many_steps_as_its_files_say(tmp_path: Path, steps: int) -> None:
    path = tiny_pipeline(KINDS[0], tmp_path / "pipeline", scheduler=LCMScheduler(original_inference_steps=40))
    assert PixelFiles.read(path).most_steps == 40
    painter = load_painter(path)
    if steps == 40:
        assert painter.begin(0, context("a train", 5, steps=steps)) == steps
    else:
        with pytest.raises(ValueError, match="original"):
            painter.begin(0, context("a train", 5, steps=steps))


def test_broken_weights_fail_the_image(folder: Path) -> None:
    runner = runner_of(folder)
    torch.nn.init.constant_(runner._painter.family.pipe.vae.decoder.conv_out.bias, torch.nan)
    result = runner.run(step(1, [1], [PixelJoin(1, context("a train", 5, steps=1))]))
    assert "are not finite" in result.errors[1]
    assert len(runner._painter) == 0


def test_a_pipeline_that_cannot_be_served_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model_index\.json"):
        load_painter(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "FooPipeline"}')
    with pytest.raises(ValueError, match="_class_name 'FooPipeline'; the classes that paint here are: StableDiffusion"):
        load_painter(tmp_path)
    path = tiny_pipeline(KINDS[0], tmp_path / "broken")
    (path / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="StableDiffusionPipeline"):
        load_painter(path)
    with pytest.raises(ValueError, match="quantization must be none"):
        load_painter(saved(folder, KINDS[0]), quantization="int8")
    with pytest.raises(ValueError, match="dtype must be auto, float32 or bfloat16"):
        load_painter(saved(folder, KINDS[0]), dtype="float16")
