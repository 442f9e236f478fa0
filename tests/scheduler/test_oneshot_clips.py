"""The one-shot lane: clips of voices are encoded beside the steps and windows of a worker, which wait for none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from interfaces import Batch, ClipContext, CodecContext, PoolingTask, RequestID, SamplingParams, Submit, TextContext
from scheduler.quarantine import CRASHES_BEFORE_ISOLATION
from tests.scheduler.simulated_worker import SimulatedWorker
from tests.scheduler.text_yard import REPLICA, TextYard, run

TASKS = ["decode_speech", "encode_speech", "generate"]


class Bed:
    """A worker that generates, decodes windows and encodes clips. What it is sent is answered by hand."""

    def __init__(self) -> None:
        self.yard = TextYard(workers=0)
        self.scheduler = self.yard.scheduler
        self.start(0)

    def start(self, epoch: int) -> None:
        self.worker = SimulatedWorker(0, epoch, num_blocks=40, block_size=4, max_rows=8, max_model_len=80)
        self.worker.hello = replace(self.worker.hello, tasks=TASKS, vocab_size=1000)
        assert self.scheduler.worker_hello(self.worker.hello)

    def generate(self, handle: int) -> None:
        context = TextContext.from_prompt([1, 2], SamplingParams(max_new_tokens=60))
        self.scheduler.submit(REPLICA, Submit(handle, context))

    def window(self, handle: int) -> None:
        context = CodecContext.of([[1, 2, 3]], PoolingTask.DECODE_SPEECH, width=1, request_id=RequestID(f"w{handle}"))
        self.scheduler.submit(REPLICA, Submit(handle, context))

    def clip(self, handle: int, samples: int = 480_000) -> None:
        context = ClipContext.of_samples(np.zeros(samples, np.float32), RequestID(f"c{handle}"), "m")
        self.scheduler.submit(REPLICA, Submit(handle, context))

    def sent(self) -> list[Batch]:
        """The batches that the worker gets now."""
        return [batch for _, batch in self.scheduler.next_batches() if isinstance(batch, Batch)]

    def steps(self, count: int) -> int:
        """Let the worker run so many steps. Returns how many it got."""
        done = 0
        for _ in range(count):
            for _, step in self.scheduler.next_steps():
                self.scheduler.step_result(self.worker.run(step))
                done += 1
        return done

    def answered(self, batch: Batch) -> list[int]:
        """Answer a batch. Returns the handles whose values came."""
        self.yard.clock.advance(0.01)
        self.scheduler.batch_result(run(batch, 0))
        return [vectors.handle for _, vectors in self.scheduler.take_vectors()]


def is_clip(batch: Batch) -> bool:
    return all(isinstance(part, ClipContext) for part in batch.parts)


def test_steps_and_windows_go_on_while_a_clip_is_encoded() -> None:
    bed = Bed()
    bed.generate(1)
    assert bed.steps(3) == 3
    bed.clip(2)
    (clip,) = bed.sent()
    assert is_clip(clip)
    for handle in range(10, 20):
        bed.window(handle)
        (window,) = bed.sent()
        assert not is_clip(window)
        # No further batch before the next step, and the clip changes nothing about that.
        assert bed.sent() == []
        assert bed.answered(window) == [handle]
        assert bed.steps(2) == 2
    assert bed.answered(clip) == [2]


def test_clips_are_encoded_one_by_one_in_the_order_in_which_they_came() -> None:
    bed = Bed()
    for handle in (1, 2, 3):
        bed.clip(handle, 300)
    for handle in (1, 2, 3):
        (clip,) = bed.sent()
        assert len(clip.parts) == 1
        assert bed.sent() == []
        assert bed.answered(clip) == [handle]
    assert bed.scheduler.oneshot.running == 0


def test_a_clip_that_is_encoded_for_too_long_makes_the_worker_late() -> None:
    bed = Bed()
    bed.clip(1)
    (clip,) = bed.sent()
    bed.generate(2)
    worker = bed.scheduler.workers[0]
    for _ in range(20):
        bed.yard.clock.advance(5)
        assert bed.steps(1) == 1
        assert worker.lateness() is None
    assert "in batch 1 with 1 texts of requests c1" in worker.describe()
    bed.answered(clip)
    bed.clip(3)
    bed.sent()
    bed.yard.clock.advance(10_000)
    late = worker.lateness()
    assert late is not None
    assert late[0] == pytest.approx(10_000)


def test_a_clip_of_a_lost_worker_is_encoded_again() -> None:
    bed = Bed()
    bed.clip(1)
    bed.sent()
    bed.scheduler.lose_worker(0, "left", False)
    bed.start(1)
    (clip,) = bed.sent()
    assert bed.answered(clip) == [1]


def test_a_clip_that_crashed_workers_is_encoded_alone() -> None:
    bed = Bed()
    bed.clip(1)
    for epoch in range(1, CRASHES_BEFORE_ISOLATION + 1):
        assert bed.sent()
        bed.scheduler.lose_worker(0, "died")
        bed.start(epoch)
    bed.generate(2)
    ((_, step),) = bed.scheduler.next_steps()
    # A step is in flight: the clip waits for its result, and no further step comes.
    assert bed.sent() == []
    assert bed.steps(1) == 0
    bed.scheduler.step_result(bed.worker.run(step))
    (clip,) = bed.sent()
    assert is_clip(clip)
    bed.clip(3)
    assert bed.sent() == []
    assert bed.steps(1) == 0
    assert bed.answered(clip) == [1]
    assert bed.steps(1) == 1
    (other,) = bed.sent()
    assert bed.answered(other) == [3]
