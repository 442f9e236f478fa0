"""Sentences to speak in the one-shot lane: the first is answered before the last is computed."""

from __future__ import annotations

import numpy as np

from interfaces import (
    CodecContext,
    ErrorCode,
    PoolingTask,
    RequestError,
    SchedulingOptions,
    Submit,
    SynthesisContext,
    decode,
    encode,
)
from scheduler import placement
from scheduler.batches_in_flight import BatchesInFlight
from scheduler.oneshot_request import OneShotRequest, Piece
from scheduler.step_deadline import StepDeadline
from tests.scheduler.text_yard import REPLICA, Asked, TextYard


def submit(yard: TextYard, sentences: int, length: int) -> int:
    handle = len(yard.asked)
    texts = [[(i + j) % 100 + 1 for j in range(length)] for i in range(sentences)]
    seeds = np.arange(sentences, dtype=np.int64)
    context = SynthesisContext.of(texts, PoolingTask.SPEAK, seeds=seeds, request_id=f"r{handle}")
    yard.asked[handle] = Asked(context)
    yard.scheduler.submit(REPLICA, decode(encode(Submit(handle, context, SchedulingOptions()))))
    return handle


def speaking_yard(token_seconds: float) -> TextYard:
    yard = TextYard(workers=0)
    yard.token_seconds = token_seconds
    yard.start_worker(0, ("speak",))
    return yard


def test_slow_workers_get_one_sentence_at_a_time_and_requests_take_turns() -> None:
    yard = speaking_yard(0.01)
    for _ in range(2):
        submit(yard, 10, 60)
    for _ in range(6):
        yard.turn()
    assert [sum(map(len, batch.parts)) for batch in yard.sent] == [1] * 6
    assert [len(asked.values) for asked in yard.asked.values()] == [3, 3]
    assert sorted(yard.asked[0].values) == [0, 1, 2]
    yard.drain()
    for asked in yard.asked.values():
        asked.check()


def test_fast_workers_get_several_sentences_with_their_seeds() -> None:
    yard = speaking_yard(1e-5)
    submit(yard, 40, 60)
    yard.drain()
    assert max(sum(map(len, batch.parts)) for batch in yard.sent) > 1
    seeds = [part.seeds.tolist() for batch in yard.sent for part in batch.parts if isinstance(part, SynthesisContext)]
    assert [seed for group in seeds for seed in group] == list(range(40))


def test_a_slow_sentence_after_fast_ones_is_not_late() -> None:
    now = 0.0
    batches = BatchesInFlight(StepDeadline(1.0), lambda: now)
    for number in range(1, 4):
        batches.add([piece(speed=4.0)], 0)
        now += 3.0
        batches.take(number)
    batches.add([piece(speed=0.25)], 0)
    assert batches.waited() == (0.0, 1.0 + 10 * 3.0 * 16)
    assert not batches.has_room


def test_windows_of_codes_may_be_longer_than_texts() -> None:
    yard = TextYard(workers=0)
    yard.start_worker(0, ("decode_speech", "speak"))
    workers = yard.scheduler.workers.values()
    codes = [[1] * 7 * (64 + 25 + 64)]
    window = CodecContext.of(codes, PoolingTask.DECODE_SPEECH, width=7, left=64, right=64)
    assert placement.text_misfit(window, workers, 512) is None
    text = SynthesisContext.of(codes, PoolingTask.SPEAK, seeds=np.zeros(1, np.int64))
    error = placement.text_misfit(text, workers, 512)
    assert error == RequestError(ErrorCode.TOO_LONG, "text 0 has 1071 tokens; a text may have 512")


def piece(speed: float) -> Piece:
    context = SynthesisContext.of([[1] * 100], PoolingTask.SPEAK, seeds=np.zeros(1, np.int64), speed=speed)
    return OneShotRequest(REPLICA, 0, 0, 0, context, 0.0).take(100)
