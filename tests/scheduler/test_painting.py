"""Images in the one-shot lane: they join and leave between passes, and no image is lost."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from interfaces import (
    Finish,
    KeptStep,
    PaintingContext,
    PixelPreview,
    PixelResult,
    PixelStep,
    PooledValues,
    PoolingTask,
    SchedulingOptions,
    Submit,
    decode,
    encode,
)
from scheduler import painting
from scheduler.core import Scheduler
from scheduler.step_deadline import FIRST_STEP_SECONDS
from tests.scheduler.clock import Clock
from tests.scheduler.text_yard import LIMITS, REPLICA, hello


def image_of(context: PaintingContext, seed: int) -> NDArray[np.float32]:
    return np.full((context.height, context.width * 3), seed % 997, np.float32)


@dataclass
class Canvas:
    context: PaintingContext
    taken: int = 0


@dataclass
class Asked:
    context: PaintingContext
    images: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    previews: list[tuple[int, int]] = field(default_factory=list)
    finished: int = Finish.ACTIVE
    error: str = ""

    def check(self) -> None:
        assert sorted(self.images) == list(range(len(self.context)))
        for i, seed in enumerate(self.context.seeds.tolist()):
            np.testing.assert_array_equal(self.images[i], image_of(self.context, seed))


class Studio:
    """A scheduler and simulated workers that paint: an image takes one pass more than it has steps."""

    def __init__(self, workers: int = 1, seed: int = 0, pass_seconds: float = 0.01) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(LIMITS, 1, self.clock)
        self.random = random.Random(seed)
        self.pass_seconds = pass_seconds
        self.epochs: Counter[int] = Counter()
        self.in_flight: dict[int, deque[PixelStep]] = defaultdict(deque)
        self.canvases: dict[int, dict[int, Canvas]] = defaultdict(dict)
        self.asked: dict[int, Asked] = {}
        self.sent: list[PixelStep] = []
        # Seeds of images that fail alone, and of those that crash their worker.
        self.wrong: set[int] = set()
        self.deadly: set[int] = set()
        # Passes after which an image is kept, again and again; and the steps that images went on from.
        self.keeps = 0
        self.continued: list[int] = []
        for index in range(workers):
            self.start_worker(index)

    def start_worker(self, index: int) -> None:
        self.epochs[index] += 1
        self.in_flight[index].clear()
        self.canvases[index].clear()
        assert self.scheduler.worker_hello(hello(index, self.epochs[index], ("paint",)))

    def kill_worker(self, index: int, blamed: bool = True) -> None:
        self.scheduler.lose_worker(index, "died", blamed)
        self.in_flight[index].clear()
        self.canvases[index].clear()

    def submit(self, seeds: list[int], scheduling: SchedulingOptions | None = None, **options: Any) -> int:
        handle = len(self.asked)
        given: dict[str, Any] = {"prompt": "a train", "height": 16, "width": 8, "steps": 4} | options
        texts = [[1, 2, 3]] * len(seeds)
        context = PaintingContext.of(texts, PoolingTask.PAINT, seeds=np.array(seeds), request_id=f"r{handle}", **given)
        self.asked[handle] = Asked(context)
        self.scheduler.submit(REPLICA, decode(encode(Submit(handle, context, scheduling or SchedulingOptions()))))
        self.read()
        return handle

    def send(self) -> int:
        """Send what the scheduler sends now. Returns the number of passes."""
        count = 0
        while found := self.scheduler.next_batches():
            for index, message in found:
                received = decode(encode(message))
                assert isinstance(received, PixelStep)
                self.in_flight[index].append(received)
                self.sent.append(received)
                count += 1
        return count

    def answer(self, index: int = 0) -> PixelResult | None:
        """Run the oldest pass of a worker; None if an image in it crashes the worker, which comes again."""
        step = self.in_flight[index].popleft()
        self.clock.advance(self.pass_seconds)
        canvases = self.canvases[index]
        for row in step.drop.tolist():
            canvases.pop(row, None)
        passes, errors = [], {}
        for join in step.joins:
            assert len(join.context) == 1
            assert join.row not in canvases
            seed = int(join.context.seeds[0])
            if seed in self.wrong:
                errors[join.row] = "it cannot be painted"
                passes.append(0)
                continue
            canvases[join.row] = Canvas(join.context, int(join.kept or b"0"))
            if join.kept:
                self.continued.append(canvases[join.row].taken)
            passes.append(join.context.steps + 1)
        if any(int(canvas.context.seeds[0]) in self.deadly for canvas in canvases.values()):
            self.kill_worker(index)
            self.start_worker(index)
            self.read()
            return None
        done = []
        previews = []
        kept = []
        for row in step.rows.tolist():
            if row in canvases:
                canvases[row].taken += 1
                if canvases[row].taken <= canvases[row].context.previews:
                    seen = PooledValues(np.zeros((1, 3), np.float32), np.ones(1, np.int32))
                    previews.append(PixelPreview(row, canvases[row].taken, seen))
                if canvases[row].taken == canvases[row].context.steps + 1:
                    done.append(row)
                elif self.keeps and canvases[row].taken % self.keeps == 0:
                    kept.append(KeptStep(row, canvases[row].taken, b"%8d" % canvases[row].taken))
        images = []
        for row in done:
            context = canvases.pop(row).context
            values = image_of(context, int(context.seeds[0]))
            images.append(PooledValues(values, np.array([len(values)], np.int32)))
        result = PixelResult(
            step.incarnation,
            step.epoch,
            index,
            step.number,
            np.array(done, np.int32),
            images,
            np.array(passes, np.int32),
            errors,
            1,
            previews,
            kept,
        )
        self.scheduler.batch_result(decode(encode(result)))
        self.read()
        return result

    def turn(self) -> bool:
        self.send()
        busy = [index for index, steps in self.in_flight.items() if steps]
        if busy:
            self.answer(self.random.choice(busy))
        return bool(busy)

    def drain(self) -> None:
        for _ in range(10_000):
            if not self.turn():
                return
        raise AssertionError("the scheduler makes no progress")

    def read(self) -> None:
        for _, vectors in self.scheduler.take_vectors():
            asked = self.asked[vectors.handle]
            assert not asked.finished
            if vectors.preview:
                asked.previews.append((vectors.first, vectors.preview))
                continue
            for i, values in enumerate(vectors.values.texts(), vectors.first):
                assert i not in asked.images, "an image was answered twice"
                asked.images[i] = values
        for _, results in self.scheduler.take_results():
            for handle, finished in zip(results.handles.tolist(), results.finished.tolist(), strict=True):
                self.asked[handle].finished = finished
                self.asked[handle].error = results.errors[handle].message if handle in results.errors else ""

    def cancel(self, handle: int) -> None:
        self.scheduler.cancel(REPLICA, [handle])

    def log_of(self, handle: int) -> str:
        return "\n".join(str(line) for line in self.scheduler.request_log.of(f"r{handle}"))


def test_a_new_image_joins_between_two_passes_and_the_one_that_is_done_leaves() -> None:
    studio = Studio(pass_seconds=1.0)
    studio.submit([1], steps=6)
    for _ in range(2):
        studio.turn()
    studio.submit([2], steps=2)
    studio.drain()
    assert [step.rows.tolist() for step in studio.sent] == [[0]] * 2 + [[0, 1]] * 3 + [[0]] * 2
    for asked in studio.asked.values():
        asked.check()
    log = studio.log_of(0)
    assert "queued with 1 images of 3 tokens to paint" in log
    assert "image 0: step 3 of 7" in log
    assert "finished: 1 images" in log


def test_previews_come_before_the_image_and_not_after_its_request_has_ended() -> None:
    studio = Studio(pass_seconds=1.0)
    first, second = studio.submit([1, 2], previews=2, steps=3), studio.submit([3], previews=2, steps=3)
    studio.turn()
    studio.send()
    studio.cancel(second)
    studio.drain()
    assert studio.asked[first].previews == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert studio.asked[second].previews == [(0, 1)]
    studio.asked[first].check()


def test_short_passes_are_sent_ahead() -> None:
    studio = Studio()
    studio.submit([1], steps=3)
    assert studio.send() == 1
    studio.answer()
    assert studio.send() == 2
    studio.drain()
    studio.asked[0].check()


def test_the_images_of_a_request_are_painted_together_as_far_as_there_is_room() -> None:
    studio = Studio(pass_seconds=1.0)
    side = 512
    assert side * side * 4 == painting.PIXELS_ON_CPU
    studio.submit([1, 2, 3, 4, 5], height=side, width=side, steps=1)
    studio.send()
    assert studio.sent[0].rows.tolist() == [0, 1, 2, 3]
    studio.drain()
    assert studio.sent[2].rows.tolist() == [4]
    studio.asked[0].check()


def test_no_more_than_so_many_small_images_are_painted_at_once() -> None:
    studio = Studio(pass_seconds=1.0)
    studio.submit(list(range(painting.MAX_IMAGES + 4)))
    studio.send()
    assert len(studio.sent[0].rows) == painting.MAX_IMAGES
    studio.drain()
    studio.asked[0].check()


def test_a_cancelled_image_leaves_with_the_next_pass_and_is_not_answered() -> None:
    studio = Studio(pass_seconds=1.0)
    first, second = studio.submit([1], steps=9), studio.submit([2], steps=9)
    studio.turn()
    studio.send()
    studio.cancel(first)
    studio.answer()
    studio.send()
    assert studio.sent[-1].drop.tolist() == [0]
    assert studio.sent[-1].rows.tolist() == [1]
    studio.cancel(second)
    studio.drain()
    assert not studio.canvases[0]
    assert len(studio.sent) == 4
    assert not studio.asked[first].images
    assert not studio.scheduler.oneshot.running
    # A worker that only drops images still learns how long passes take.
    studio.submit([3])
    studio.drain()
    studio.asked[2].check()


def test_a_time_limit_ends_an_image_between_two_passes() -> None:
    studio = Studio(pass_seconds=1.0)
    studio.submit([1], SchedulingOptions(total_seconds=3.5), steps=20)
    for _ in range(5):
        studio.turn()
        studio.scheduler.expire()
        studio.read()
    assert studio.asked[0].finished
    assert "3.5" in studio.asked[0].error
    studio.drain()
    assert not studio.canvases[0]
    assert len(studio.sent) == 5


def test_an_image_that_fails_fails_its_request_and_no_other() -> None:
    studio = Studio(pass_seconds=1.0)
    studio.wrong = {2}
    studio.submit([1])
    studio.submit([2, 3])
    studio.drain()
    studio.asked[0].check()
    assert studio.asked[1].error == "it cannot be painted"
    assert not studio.canvases[0]


def test_images_of_a_lost_worker_begin_again_and_are_the_same() -> None:
    studio = Studio(workers=2, pass_seconds=1.0)
    for i in range(4):
        studio.submit([2 * i, 2 * i + 1])
    for _ in range(5):
        studio.turn()
    studio.kill_worker(0)
    studio.start_worker(0)
    studio.drain()
    for asked in studio.asked.values():
        asked.check()
    assert any("will be computed again" in studio.log_of(i) for i in range(4))


def test_an_image_goes_on_from_its_newest_kept_step_on_another_worker() -> None:
    studio = Studio(workers=2, pass_seconds=1.0)
    studio.keeps = 2
    studio.submit([5], steps=9)
    for _ in range(5):
        studio.turn()
    (first,) = [index for index, held in studio.canvases.items() if held]
    studio.kill_worker(first)
    assert "image 0 will be computed again, from step 4 on" in studio.log_of(0)
    before = len(studio.sent)
    studio.drain()
    studio.asked[0].check()
    assert studio.continued == [4]
    # One pass more than it has steps, without the four that were kept.
    assert len(studio.sent) - before == 10 - 4
    assert "image 0: step 6 of 10" in studio.log_of(0).partition("again")[2]


def test_what_is_kept_is_bounded_and_ends_with_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(painting, "MOST_KEPT_BYTES", 10)
    studio = Studio(pass_seconds=1.0)
    studio.keeps = 1
    first, second = studio.submit([1], steps=9), studio.submit([2], steps=9)
    for _ in range(3):
        studio.turn()
    held = {request.handle: request.kept for request in studio.scheduler.oneshot}
    # Eight bytes each: the second one finds no room.
    assert ([kept.taken for kept in held[first].values()], held[second]) == ([3], {})
    studio.kill_worker(0)
    studio.start_worker(0)
    studio.drain()
    assert studio.continued == [3]
    assert held == {first: {}, second: {}}
    for asked in studio.asked.values():
        asked.check()


def test_an_image_that_crashes_workers_does_not_go_on_from_what_may_be_the_reason() -> None:
    studio = Studio(pass_seconds=1.0)
    studio.keeps = 1
    studio.submit([1], steps=9)
    for crash in range(2):
        for _ in range(3):
            studio.turn()
        studio.kill_worker(0)
        studio.start_worker(0)
        studio.turn()
        # The first crash may have been another's fault.
        assert studio.continued == [3]
        (canvas,) = studio.canvases[0].values()
        assert canvas.taken == (4 if crash == 0 else 1)
    studio.drain()
    studio.asked[0].check()


def test_images_are_shared_among_workers() -> None:
    studio = Studio(workers=2, pass_seconds=1.0)
    studio.submit([1, 2, 3, 4], steps=5)
    for index in range(2):
        studio.send()
        studio.answer(index)
    studio.send()
    assert sorted(len(steps[-1].rows) for steps in studio.in_flight.values()) == [2, 2]
    studio.drain()
    studio.asked[0].check()


def test_an_image_that_crashes_workers_fails_alone() -> None:
    studio = Studio(pass_seconds=1.0)
    studio.deadly = {2}
    for seed in (1, 2, 3):
        studio.submit([seed])
    studio.drain()
    assert "crashed 3 times while it computed image 0 of this request" in studio.asked[1].error
    studio.asked[0].check()
    studio.asked[2].check()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_every_image_is_answered_once(seed: int) -> None:
    studio = Studio(workers=2, seed=seed, pass_seconds=0.001)
    studio.keeps = seed % 3
    drawn = studio.random
    cancelled = set()
    for _ in range(200):
        match drawn.randrange(8):
            case 0:
                seeds = [drawn.randrange(1000) for _ in range(drawn.randint(1, 4))]
                studio.submit(seeds, steps=drawn.randint(1, 6), height=drawn.choice([8, 16]))
            case 1 if studio.asked and drawn.random() < 0.3:
                handle = drawn.randrange(len(studio.asked))
                cancelled.add(handle)
                studio.cancel(handle)
            case 2 if drawn.random() < 0.3:
                index = drawn.randrange(2)
                studio.kill_worker(index, blamed=False)
                studio.start_worker(index)
            case _:
                studio.turn()
    studio.drain()
    assert not any(studio.canvases.values())
    for handle, asked in studio.asked.items():
        if handle not in cancelled:
            asked.check()


@pytest.mark.parametrize(("side", "times"), [(16, 1), (1024, 1), (2048, 4)])
def test_the_first_pass_of_a_large_image_has_more_time(side: int, times: int) -> None:
    studio = Studio()
    studio.submit([1], height=side, width=side, steps=30)
    studio.send()
    waited = studio.scheduler.workers[0].batches.waited()
    assert waited is not None
    assert waited[1] == times * FIRST_STEP_SECONDS
