"""Steps that reuse the prediction before: only where an image asks for it, and each image by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.painting import Counted
from model_worker.pixels.load import load_painter
from model_worker.pixels.step_cache import StepCache
from tests.model_worker.pixels.test_painter import CLOSE, alone, context
from tests.model_worker.pixels.tiny_pipelines import tiny_pipeline


def test_changes_add_up_to_the_threshold() -> None:
    cache = StepCache(0.25)
    assert cache.reused(False) is None
    cache.computed(torch.full([4], 10.0))
    assert cache.reused(False) is None
    cache.computed(torch.full([4], 11.0))  # a change of a tenth
    for _ in range(2):
        found = cache.reused(False)
        assert found is not None
        assert found[0] == 11
    assert cache.reused(False) is None
    assert cache.reused(True) is None
    cache.computed(torch.full([4], 22.0))  # it doubles
    assert cache.reused(False) is None
    cache.computed(torch.full([4], 22.0))
    assert cache.reused(True) is None
    assert cache.reused(False) is not None


def test_an_image_reuses_steps_only_if_it_asks_for_it(tmp_path: Path) -> None:
    painter = load_painter(tiny_pipeline("StableDiffusionPipeline", tmp_path / "pipeline"))
    counted = Counted(painter.family)

    def entries(threshold: float) -> tuple[int, NDArray[np.float32]]:
        counted.entries = 0
        image = alone(painter, context("a red train", 5, steps=12, guidance_scale=1.0, step_cache=threshold))
        return counted.entries, image

    every, exact = entries(0.0)
    few, near = entries(1.0)
    assert every == 12
    assert 3 <= few < every
    assert np.isfinite(near).all()
    assert np.abs(near - exact).max() > CLOSE
    none, same = entries(1e-12)
    assert none == every
    np.testing.assert_array_equal(same, exact)
    # Among others: those stay exact, and it skips the same steps.
    counted.entries = 0
    painter.begin(0, context("a red train", 5, steps=12, guidance_scale=1.0, step_cache=1.0))
    painter.begin(1, context("a red train", 5, steps=12, guidance_scale=1.0))
    images: dict[int, NDArray[np.float32]] = {}
    while len(painter):
        images.update(painter.advance([0, 1]).images)
    assert counted.entries == every + few
    np.testing.assert_allclose(images[0], near, atol=CLOSE)
    np.testing.assert_allclose(images[1], exact, atol=CLOSE)


def test_a_threshold_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="step_cache must be from 0 to 1, got 2"):
        context("a train", 5, step_cache=2)
