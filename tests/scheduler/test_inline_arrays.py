"""Images on the way to workers of other machines, which cannot map the shared memory of this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from interfaces import (
    CUT_IMAGES,
    MESSAGE_THRESHOLD,
    ImageMetadata,
    SamplingParams,
    Segments,
    SharedMemoryArray,
    Step,
    Submit,
    TextAndVisionContext,
    decode,
    encode,
)
from scheduler import inline_arrays, placement
from tests.scheduler.simulated_worker import SimulatedWorker
from tests.scheduler.test_core import REPLICA, Yard

VISION = 9
PIXELS = np.arange(MESSAGE_THRESHOLD, dtype=np.float32)


@pytest.fixture
def segments() -> Iterator[Segments]:
    made = Segments()
    yield made
    made.release_all()


def yard_of(*remote: bool) -> Yard:
    """A scheduler with a worker for each argument."""
    yard = Yard(workers=0, num_blocks=200)
    for index, is_remote in enumerate(remote):
        worker = SimulatedWorker(index, 0, **yard.shape)
        assert yard.scheduler.worker_hello(replace(worker.hello, images=CUT_IMAGES))
        yard.scheduler.workers[index].remote = is_remote
    return yard


def submit(yard: Yard, segments: Segments, handle: int = 1) -> ImageMetadata:
    tokens = np.ones(20, np.int64)
    tokens[4:8] = VISION
    image = ImageMetadata(start_idx=4, end_idx=8, pixel_values=PIXELS, image_hash=5)
    image.share_arrays(segments)
    assert isinstance(image.pixel_values, SharedMemoryArray)
    params = SamplingParams(max_new_tokens=3)
    context = TextAndVisionContext.from_prompt(tokens, params, vision_token_ids=[VISION], images=[image])
    yard.scheduler.submit(REPLICA, Submit(handle, context))
    return image


def sent_images(steps: list[tuple[int, Step]], ipc_peer: bool) -> list[ImageMetadata]:
    """The images as a worker gets them."""
    return [
        image for _, step in steps for join in decode(encode(step), ipc_peer=ipc_peer).joins for image in join.images
    ]


def test_arrays_travel_inline_to_other_machines_and_as_segments_to_this_one(segments: Segments) -> None:
    yard = yard_of(True)
    submit(yard, segments)
    (image,) = sent_images(yard.scheduler.next_steps(), ipc_peer=False)
    assert isinstance(image.pixel_values, np.ndarray)
    assert (image.pixel_values == PIXELS).all()
    yard = yard_of(False)
    submit(yard, segments)
    (image,) = sent_images(yard.scheduler.next_steps(), ipc_peer=True)
    assert isinstance(image.pixel_values, SharedMemoryArray)


def test_a_segment_that_its_owner_has_removed_fails_its_request_alone(segments: Segments) -> None:
    yard = yard_of(True)
    submit(yard, segments, handle=1)
    segments.release_all()
    submit(yard, segments, handle=2)
    steps = yard.scheduler.next_steps()
    assert len(sent_images(steps, ipc_peer=False)) == 1
    ((_, results),) = yard.scheduler.take_results()
    assert "an image of this request is not there any more" in results.errors[1].message


def test_a_step_has_a_bounded_number_of_bytes(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MOST_INLINE_BYTES", PIXELS.nbytes * 2)
    yard = yard_of(True)
    for handle in range(3):
        submit(yard, segments, handle)
    assert len(sent_images(yard.scheduler.next_steps(), ipc_peer=False)) == 2
    assert len(sent_images(yard.scheduler.next_steps(), ipc_peer=False)) == 1
    assert inline_arrays.MOST_INLINE_BYTES == 64 << 20


def test_a_request_with_more_goes_to_a_local_worker_or_is_refused(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MOST_INLINE_BYTES", PIXELS.nbytes - 1)
    yard = yard_of(True, False)
    submit(yard, segments)
    assert [index for index, _ in yard.scheduler.next_steps()] == [1]
    yard = yard_of(True)
    submit(yard, segments)
    assert yard.scheduler.next_steps() == []
    ((_, results),) = yard.scheduler.take_results()
    assert f"the images take {PIXELS.nbytes} bytes" in results.errors[1].message
