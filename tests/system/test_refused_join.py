"""A request that only the worker can refuse fails alone, however many steps its prompt takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from interfaces import Finish, ImageMetadata, SamplingParams, TextAndVisionContext
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, Shape, load


@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_prompt_with_a_bias_outside_the_vocabulary(tmp_path: Path, overlap: bool) -> None:
    loaded = load(tiny_model("llama", tmp_path))
    server = InProcessServer(loaded, Shape(max_batch_tokens=8, overlap=overlap))
    prompt = list(range(3, 43))
    good = SamplingParams(temperature=0, max_new_tokens=6)
    server.submit(prompt, good)
    server.submit(prompt[::-1], SamplingParams(temperature=0, max_new_tokens=6, logit_bias={VOCAB + 7: 1.0}))
    first, bad = server.run()
    assert len(first.tokens) == 6
    assert (bad.finished, bad.tokens) == (Finish.FAILED, [])
    assert str(VOCAB + 7) in bad.error
    server.submit(prompt[::-1], good)
    assert len(server.run()[2].tokens) == 6, "the row is usable again"


def test_an_image_for_a_model_that_takes_none(tmp_path: Path) -> None:
    server = InProcessServer(load(tiny_model("llama", tmp_path)), Shape())
    good = SamplingParams(temperature=0, max_new_tokens=6)
    image = ImageMetadata(start_idx=1, end_idx=3, pixel_values=np.zeros((3, 4, 4), np.float32))
    server.submit_context(
        TextAndVisionContext.from_prompt([3, 9, 9, 5], good, vision_token_ids=[9], images=[image]),
    )
    server.submit([3, 9, 9, 5], good)
    bad, other = server.run()
    assert (bad.finished, bad.tokens, bad.error) == (Finish.FAILED, [], "this model takes no images")
    assert len(other.tokens) == 6
