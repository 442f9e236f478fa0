"""Which worker gets a request, and which requests no worker can run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from interfaces import ErrorCode, SamplingParams, TextContext
from scheduler import placement
from scheduler.sequence import Sequence
from tests.scheduler.simulated_worker import VOCAB
from tests.scheduler.test_core import Yard


def sequence(yard: Yard) -> Sequence:
    yard.submit(99, [1, 2, 3], 5, [])
    return yard.scheduler.replicas.all_sequences()[-1]


def test_the_worker_with_the_fewest_sequences_is_tried_first() -> None:
    yard = Yard(workers=3, num_blocks=200)
    for handle in range(11):
        yard.submit(handle, [handle + 1], 30, [])
    yard.scheduler.next_steps()
    workers = list(yard.scheduler.workers.values())
    assert sorted(worker.rows.running for worker in workers) == [3, 4, 4]
    random.shuffle(workers)
    ordered = placement.order(workers, sequence(yard))
    assert [worker.rows.running for worker in ordered] == [3, 4, 4]
    assert placement.order(ordered[1:], sequence(yard)) == ordered[1:], "equal ones keep their order"


def test_another_worker_is_tried_when_the_first_has_no_room() -> None:
    yard = Yard(workers=1, num_blocks=3)
    yard.shape |= {"num_blocks": 30}
    yard.start_worker(1, epoch=0)
    yard.submit(0, list(range(1, 41)), 5, [])
    yard.scheduler.next_steps()
    assert [worker.rows.running for worker in yard.scheduler.workers.values()] == [0, 1]


@pytest.mark.parametrize(
    ("tokens", "wanted", "code"),
    [
        ([1] * 79, None, None),
        ([1] * 80, None, ErrorCode.TOO_LONG),
        ([1] * 20, 20, ErrorCode.TOO_LONG),
        ([1] * 19, 20, None),
        ([VOCAB], None, ErrorCode.INVALID),
    ],
)
def test_what_no_worker_can_run_is_named(tokens: list[int], wanted: int | None, code: str | None) -> None:
    workers = Yard(workers=2).scheduler.workers.values()
    context = TextContext.from_prompt(tokens, SamplingParams(seed=0))
    error = placement.misfit(context, workers, wanted)
    assert (None if error is None else error.code) == code


def test_the_smallest_worker_decides_what_fits() -> None:
    yard = Yard(workers=1)
    yard.shape |= {"max_model_len": 40}
    yard.start_worker(1, epoch=0)
    workers = yard.scheduler.workers.values()
    assert placement.max_model_len(workers, None) == 40
    assert placement.max_model_len(workers, 30) == 30
    assert placement.max_model_len(workers, 60) == 40
    assert placement.max_model_len([], 60) == 0
    workers_hello = yard.workers[0].hello
    assert not yard.scheduler.worker_hello(replace(workers_hello, vocab_size=VOCAB - 1))
    assert placement.vocab_size(workers) == VOCAB - 1
