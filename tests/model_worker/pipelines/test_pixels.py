"""A pipeline that paints: all images of its requests, painted together, as PNG."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from interfaces import PaintingContext, PixelGenerationInputs, PoolingTask
from interfaces.pipelines.generation_output import OutputImageContent
from model_worker.pipelines.pixels import TOGETHER, PixelPipeline
from tests.model_worker.pixels.tiny_pipelines import Reference, tiny_pipeline

KIND = "StableDiffusion3Pipeline"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipeline(KIND, tmp_path_factory.mktemp("pipeline"))


def context(prompt: str, seeds: list[int], **options: Any) -> PaintingContext:
    given: dict[str, Any] = {"height": 32, "width": 32, "steps": 3, "guidance_scale": 7.0} | options
    texts = [[0, 1, 2]] * len(seeds)
    return PaintingContext.of(texts, PoolingTask.PAINT, seeds=np.array(seeds), prompt=prompt, **given)


def test_the_images_of_all_requests_are_diffusers_own(folder: Path) -> None:
    pipeline = PixelPipeline.load(folder)
    many, one = context("a train", list(range(TOGETHER + 1))), context("night", [7], steps=5, width=48)
    outputs = pipeline.execute(PixelGenerationInputs({many.request_id: many, one.request_id: one}))
    assert [len(outputs[wanted.request_id].output) for wanted in (many, one)] == [TOGETHER + 1, 1]
    reference = Reference(KIND, folder)
    for wanted, place in ((many, 0), (many, TOGETHER), (one, 0)):
        output = outputs[wanted.request_id]
        assert output.is_done
        part = output.output[place]
        assert isinstance(part, OutputImageContent)
        assert part.image_data is not None
        found = np.asarray(Image.open(io.BytesIO(base64.b64decode(part.image_data))))
        expected = reference.image(
            wanted.prompt,
            int(wanted.seeds[place]),
            height=32,
            width=wanted.width,
            num_inference_steps=wanted.steps,
            guidance_scale=7.0,
        )
        np.testing.assert_allclose(found, np.asarray(expected * 255).round(), atol=1)
    usage = outputs[many.request_id].usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (3, 4 * (TOGETHER + 1))


def test_what_cannot_be_painted_leaves_nothing_behind(folder: Path) -> None:
    pipeline = PixelPipeline.load(folder)
    with pytest.raises(ValueError, match="height and width must be multiples of 4, got 30"):
        pipeline.paint([context("a train", [1]), context("a train", [1], width=30)])
    (images,) = pipeline.paint([context("a train", [1])])
    assert len(images) == 1
    with torch.no_grad():
        pipeline._painter.family.pipe.vae.decoder.conv_out.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="are not finite"):
        pipeline.paint([context("a train", [1, 2])])
    assert len(pipeline._painter) == 0
