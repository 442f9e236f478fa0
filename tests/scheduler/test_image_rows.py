"""Rows that wait for images: how far they run, what is never cut, and which messages count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from interfaces import (
    CUT_IMAGES,
    WHOLE_IMAGES,
    WHOLE_PROMPTS,
    ImageMetadata,
    Ready,
    SamplingParams,
    SchedulingOptions,
    StepResult,
    Submit,
    TextAndVisionContext,
)
from scheduler.image_rows import ENCODE_SECONDS, ImageRows
from scheduler.rows import ALL_TOKENS, RowTable
from scheduler.sequence import Sequence
from tests.scheduler.clock import Clock
from tests.scheduler.simulated_worker import SimulatedWorker
from tests.scheduler.test_core import REPLICA, Yard

VISION = 9


def sequence_of(*spans: tuple[int, int], length: int = 20) -> Sequence:
    tokens = np.ones(length, np.int64)
    for start, end in spans:
        tokens[start:end] = VISION
    images = [ImageMetadata(start_idx=start, end_idx=end, pixel_values=np.zeros(1, np.float32)) for start, end in spans]
    context = TextAndVisionContext.from_prompt(
        tokens, SamplingParams(max_new_tokens=3), vision_token_ids=[VISION], images=images
    )
    return Sequence.of(b"replica", Submit(1, context), 0)


def placed(takes: int, sequence: Sequence, cached: int = 0, clock: Clock | None = None) -> tuple[RowTable, ImageRows]:
    table = RowTable(4)
    rows = ImageRows(table, takes, clock or Clock())
    table.take(sequence, 0, 100, cached)
    rows.placed(sequence, cached)
    table.joined[sequence.row] = 7
    return table, rows


def ready(row: int, upto: int, joined: int = 7, errors: dict[int, str] | None = None) -> Ready:
    return Ready(
        1, 0, 0, np.array([row], np.int32), np.array([joined], np.int64), np.array([upto], np.int32), errors or {}
    )


@pytest.mark.parametrize(("cached", "upto"), [(0, 4), (4, 4), (6, 4), (8, 12), (16, ALL_TOKENS)])
def test_a_row_runs_up_to_its_first_image_that_is_not_cached(cached: int, upto: int) -> None:
    sequence = sequence_of((4, 8), (12, 15))
    table, _ = placed(CUT_IMAGES, sequence, cached)
    assert table.upto[sequence.row] == upto
    assert (sequence.row in table.runnable()) == (cached < upto)


def test_a_message_for_an_earlier_owner_of_the_row_does_not_count() -> None:
    sequence = sequence_of((4, 8))
    table, rows = placed(CUT_IMAGES, sequence)
    assert rows.ready(ready(sequence.row, ALL_TOKENS, joined=6, errors={sequence.row: "broken"})) == ([], [])
    assert table.upto[sequence.row] == 4
    assert rows.ready(ready(sequence.row, ALL_TOKENS)) == ([(sequence, 0.0)], [])
    assert table.upto[sequence.row] == ALL_TOKENS
    assert rows.ready(ready(sequence.row, 0, errors={sequence.row: "broken"})) == ([], [(sequence, "broken")])


@pytest.mark.parametrize(
    ("takes", "computed", "share", "whole"),
    [
        (CUT_IMAGES, 0, 6, 6),
        (WHOLE_IMAGES, 0, 3, 3),
        (WHOLE_IMAGES, 0, 4, 4),
        (WHOLE_IMAGES, 0, 6, 4),
        (WHOLE_IMAGES, 0, 8, 8),
        (WHOLE_IMAGES, 4, 2, 4),
        (WHOLE_IMAGES, 6, 1, 2),
        (WHOLE_IMAGES, 8, 5, 4),
        (WHOLE_PROMPTS, 0, 6, 20),
    ],
)
def test_no_image_is_cut_where_none_may_be(takes: int, computed: int, share: int, whole: int) -> None:
    sequence = sequence_of((4, 8), (12, 15))
    table, rows = placed(takes, sequence)
    table.num_computed_tokens[sequence.row] = computed
    assert rows.whole(sequence.row, share) == whole


def test_all_images_are_awaited_where_all_tokens_see_each_other() -> None:
    sequence = sequence_of((4, 8), (12, 15))
    table, rows = placed(WHOLE_PROMPTS, sequence)
    assert table.upto[sequence.row] == 0
    rows.ready(ready(sequence.row, 12))
    assert table.upto[sequence.row] == 0
    rows.ready(ready(sequence.row, ALL_TOKENS))
    assert table.upto[sequence.row] == ALL_TOKENS
    assert not rows.shares_prefix(sequence)


def test_a_worker_that_encodes_for_too_long_is_late_and_its_oldest_row_is_suspected() -> None:
    clock = Clock()
    sequence = sequence_of((4, 8))
    _, rows = placed(CUT_IMAGES, sequence, clock=clock)
    assert rows.encoding() == [sequence]
    assert rows.lateness() is None
    clock.now += ENCODE_SECONDS + 1
    assert rows.lateness() == pytest.approx(ENCODE_SECONDS + 1, abs=0.01)
    rows.grant_grace()
    assert rows.lateness() is None
    clock.now += ENCODE_SECONDS + 1
    rows.ready(ready(sequence.row, ALL_TOKENS))
    assert rows.lateness() is None
    assert rows.encoding() == []


def test_the_time_of_an_image_whose_row_has_gone_is_not_that_of_the_next_one() -> None:
    clock = Clock()
    gone, following = sequence_of((4, 8)), sequence_of((4, 8))
    table, rows = placed(CUT_IMAGES, gone, clock=clock)
    table.give_back(gone.row)
    clock.now += ENCODE_SECONDS + 3000
    table.take(following, 0, 100, 0)
    rows.placed(following, 0)
    assert rows.lateness() is None
    clock.now += ENCODE_SECONDS + 1
    assert rows.lateness() == pytest.approx(ENCODE_SECONDS + 1, abs=0.01)


@pytest.mark.parametrize(("seconds", "words"), [(1.5, "has encoded its images in 1.500 s"), (0.0, "has kept the")])
def test_why_tells_the_time_of_encoding(seconds: float, words: str) -> None:
    yard = Yard(workers=0)
    worker = SimulatedWorker(0, 0, **yard.shape)
    assert yard.scheduler.worker_hello(replace(worker.hello, images=CUT_IMAGES))
    context = sequence_of((10, 14)).context
    yard.scheduler.submit(REPLICA, Submit(1, context))
    ((_, step),) = yard.scheduler.next_steps()
    (join,) = step.joins
    message = ready(join.row, ALL_TOKENS, joined=step.step)
    yard.scheduler.images_ready(replace(message, seconds=np.array([seconds], np.float32)))
    assert words in yard.scheduler.request_log.of(str(context.request_id))[-1]


def test_no_empty_steps_are_sent_while_a_deterministic_row_waits_for_its_image() -> None:
    yard = Yard(workers=0)
    worker = SimulatedWorker(0, 0, **yard.shape)
    assert yard.scheduler.worker_hello(replace(worker.hello, images=CUT_IMAGES))
    context = sequence_of((10, 14)).context
    yard.scheduler.submit(REPLICA, Submit(1, context, SchedulingOptions(deterministic=True)))
    ((_, step),) = yard.scheduler.next_steps()
    assert [join.row for join in step.joins] == [0]
    assert not len(step.rows)
    assert yard.scheduler.next_steps() == []
    # The time of an empty step says nothing about rows in decode.
    yard.clock.advance(0.01)
    yard.scheduler.workers[0].receive(
        StepResult(1, 0, 0, step.step, np.empty(0, np.int32), np.empty(0, np.int32), None, {}, 1)
    )
    assert yard.scheduler.workers[0].prefill_budget._decode == {}
