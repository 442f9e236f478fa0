"""`LLM.paint`: diffusers' images, without a server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deploy.offline import LLM
from tests.model_worker.pixels.tiny_pipelines import Reference, tiny_pipeline

KIND = "StableDiffusionPipeline"


def test_images_of_a_description(tmp_path: Path) -> None:
    folder = tiny_pipeline(KIND, tmp_path / "pipeline")
    with LLM(folder) as llm:
        found = llm.paint("a train", n=2, size="48x32", steps=3, seed=5, guidance_scale=2.0, negative_prompt="blue")
        for wrong, words in (
            ({"size": "30x30"}, "the nearest size is 32x32"),
            ({"seed": -1}, "seed must be from 0"),
            ({"n": 0}, "n must be at least 1, got 0"),
            ({"steps": 201}, "steps must be from 1 to 200, got 201"),
        ):
            with pytest.raises(ValueError, match=words):
                llm.paint("a train", **wrong)
    reference = Reference(KIND, folder)
    for i, image in enumerate(found):
        expected = reference.image(
            "a train",
            5 + i,
            height=32,
            width=48,
            num_inference_steps=3,
            guidance_scale=2.0,
            negative_prompt="blue",
        )
        np.testing.assert_allclose(image, np.asarray(expected * 255).round(), atol=1)
