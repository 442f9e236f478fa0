"""Images in a prompt: what is refused, where chunks end, which images come next."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces.context.images import ImageMetadata
from interfaces.context.protocols import VLMTextGenerationContext
from interfaces.context.tokens import TokenBuffer
from interfaces.context.vision import TextAndVisionContext

VISION, TEXT = 9, 1


def image(start: int, end: int) -> ImageMetadata:
    return ImageMetadata(start_idx=start, end_idx=end, pixel_values=np.zeros((2, 3), np.float32))


def context_of(tokens: list[int], spans: list[tuple[int, int]]) -> TextAndVisionContext:
    return TextAndVisionContext(
        tokens=TokenBuffer(np.array(tokens, np.int64)),
        max_length=1000,
        vision_token_ids=[VISION],
        images=[image(*span) for span in spans],
    )


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Images with texts between some of them, and text at both ends."""
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    for i in range(draw(st.integers(0, 4))):
        tokens += [TEXT] * draw(st.integers(0 if i else 1, 4))
        length = draw(st.integers(1, 6))
        spans.append((len(tokens), len(tokens) + length))
        tokens += [VISION] * length
    return [*tokens, *[TEXT] * draw(st.integers(1, 4))], spans


@settings(max_examples=200, deadline=None)
@given(prompts(), st.data())
def test_chunks_cover_the_prompt_and_cut_no_image(
    prompt: tuple[list[int], list[tuple[int, int]]], data: st.DataObject
) -> None:
    tokens, spans = prompt
    context = context_of(tokens, spans)
    assert isinstance(context, VLMTextGenerationContext)
    processed: list[int] = []
    while True:
        size = data.draw(st.integers(1, 8))
        start = context.tokens.processed_length
        context.chunk(size)
        end = context.tokens.current_position
        assert not any(first < end < last for first, last in spans)
        alone = any(first == start and end == last for first, last in spans)
        assert end - start <= size or alone, "only one image may be longer than was asked"
        assert [i.start_idx for i in context.next_images] == [first for first, last in spans if last > start]
        assert context.needs_vision_encoding == bool(context.next_images)
        processed += context.tokens.active.tolist()
        chunked = context.tokens.actively_chunked
        context.update(TEXT)
        if not chunked:
            break
    assert processed == tokens
    assert not context.needs_vision_encoding
    assert context.image_token_indices.tolist() == [i for first, last in spans for i in range(first, last)]
    assert context.image_token_indices.dtype == np.int32


def test_an_index_within_an_image_is_moved_to_its_start() -> None:
    context = context_of([1, 1, 9, 9, 9, 1], [(2, 5)])
    assert [context.compute_image_aligned_idx(i) for i in range(7)] == [0, 1, 2, 2, 2, 5, 6]


@pytest.mark.parametrize(
    ("tokens", "spans", "complaint"),
    [
        ([1, 9, 9, 1, 9, 1], [(4, 5), (1, 3)], "in the order"),
        ([1, 9, 9, 9, 1], [(1, 3), (2, 4)], "in the order"),
        ([1, 9, 9, 9, 1], [(1, 3), (1, 4)], "share no token"),
        ([1, 9, 9], [(1, 4)], "behind the 3 tokens"),
        ([1, 1, 9, 1], [(1, 3)], "none of the vision token ids"),
        ([1, 9, 1, 1], [(1, 3)], "none of the vision token ids"),
    ],
)
def test_images_that_do_not_fit_the_prompt_are_refused(
    tokens: list[int], spans: list[tuple[int, int]], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        context_of(tokens, spans)


def test_images_may_touch() -> None:
    context = context_of([1, 9, 9, 9, 1], [(1, 2), (2, 4)])
    assert [(image.start_idx, image.end_idx) for image in context.next_images] == [(1, 2), (2, 4)]


def test_images_differ_by_their_side_arrays() -> None:
    grids = [np.array([[1, 2, 3]]), np.array([[1, 3, 2]])]
    images = [
        ImageMetadata(start_idx=0, end_idx=1, pixel_values=np.zeros(2, np.float32), extras={"image_grid_thw": grid})
        for grid in (grids[0], grids[0].copy(), grids[1])
    ]
    assert images[0] == images[1]
    assert images[0] != images[2]
    assert images[0].side_arrays["image_grid_thw"].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(("start", "end", "complaint"), [(-1, 2, "start_idx"), (2, 2, "end_idx"), (3, 2, "end_idx")])
def test_spans_that_are_none_are_refused(start: int, end: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        image(start, end)


def test_pixels_are_float32_or_bfloat16_bits_and_are_not_printed() -> None:
    with pytest.raises(ValueError, match="float32 or uint16"):
        ImageMetadata(start_idx=0, end_idx=1, pixel_values=np.zeros(2))
    assert "pixel_values=(2, 3)" in repr(image(0, 1))
