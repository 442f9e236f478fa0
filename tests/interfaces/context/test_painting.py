"""Contexts of images to paint keep each seed with its image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from interfaces import (
    PaintingContext,
    PixelJoin,
    PixelStep,
    PoolingTask,
    Segments,
    SharedMemoryArray,
    Submit,
    decode,
    encode,
)


def context(**options: Any) -> PaintingContext:
    given: dict[str, Any] = {
        "seeds": np.array([7, 2**62, 9]),
        "prompt": "a train",
        "height": 64,
        "width": 48,
        "steps": 20,
        "guidance_scale": 7.5,
    }
    return PaintingContext.of([[1, 2, 3]] * 3, PoolingTask.PAINT, **(given | options))


def test_seeds_go_with_their_images() -> None:
    whole = context()
    assert whole.part(1, 3).seeds.tolist() == [2**62, 9]
    assert whole.select(np.array([0, 2])).seeds.tolist() == [7, 9]
    joined = PaintingContext.joined([whole, whole.part(0, 1)])
    assert joined.seeds.tolist() == [7, 2**62, 9, 7]
    assert len(joined) == 4


@pytest.mark.parametrize("negative", [None, "", "blue"])
def test_it_travels_as_itself(negative: str | None) -> None:
    whole = context(negative_prompt=negative)
    received = decode(encode(Submit(1, whole))).context
    assert type(received) is PaintingContext
    assert received == whole
    assert received.negative_prompt == negative
    step = PixelStep(1, 2, 3, np.array([4], np.int32), np.array([], np.int32), [PixelJoin(4, whole.part(0, 1))])
    (join,) = decode(encode(step)).joins
    assert (join.row, join.context) == (4, whole.part(0, 1))


def test_the_image_to_begin_with_travels_by_shared_memory_where_it_is_large() -> None:
    given = {"original": np.full((512, 768), 7, np.uint8), "mask": np.zeros((512, 256), np.uint8), "strength": 0.25}
    whole = context(height=512, width=256, **given)
    plain = decode(encode(Submit(1, whole))).context
    assert plain == whole
    assert plain.options != whole.options
    segments = Segments()
    whole.share_arrays(segments)
    assert isinstance(whole.original, SharedMemoryArray)
    received = decode(encode(Submit(1, whole)), ipc_peer=True).context.part(0, 1)
    assert received.original == whole.original
    np.testing.assert_array_equal(received.inline().original, given["original"])
    whole.unshare_arrays(segments)
    assert not len(segments)
    assert whole == plain
    # Its request has ended.
    assert received.inline().original is None
    # A quarter of the steps is taken.
    assert whole.costs[1] == 512 * 256 / 256 * 5 / 64
    assert whole.token_cost == 1 / 5


def test_an_image_weighs_what_is_denoised_for_it() -> None:
    # 4 by 3 patches, 20 times.
    assert context().costs.tolist() == [0, 4, 8, 12]
    assert context(steps=1).costs.tolist() == [0, 1, 2, 3]
    assert context(height=1024, width=1024, steps=50).costs[-1] == 3 * 3200
    assert context(height=65).patches == 15


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"seeds": np.array([1, 2])}, "seeds must have one int64 for each of the 3 images"),
        ({"seeds": np.array([1, 2, -3])}, "seeds must be at least 0, got -3"),
        ({"height": 0}, "height must be at least 1, got 0"),
        ({"width": -8}, "width must be at least 1, got -8"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"guidance_scale": float("nan")}, "guidance_scale must be a finite number"),
        ({"strength": 0.0}, "strength must be above 0 and at most 1, got 0"),
        ({"original": np.zeros((64, 48), np.uint8)}, r"original must be uint8\[64, 144\], got uint8\[64, 48\]"),
        ({"original": np.zeros((64, 144), np.float32)}, "original must be uint8"),
        ({"mask": np.zeros((64, 48), np.uint8)}, "mask needs an original"),
    ],
)
def test_values_that_contradict_each_other_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        context(**wrong)
