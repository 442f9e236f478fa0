"""Which worker gets a request, and which requests no worker can run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from interfaces import ErrorCode, RequestError, RequestID, SamplingParams, Submit, TextContext
from scheduler import placement
from scheduler.placement_cost import ROWS_APART, TOKENS_OF_A_ROW, WEIGHT_OF_NEW_TOKENS, least_cost
from scheduler.sequence import Sequence
from tests.scheduler.simulated_worker import VOCAB
from tests.scheduler.test_core import LIMITS, REPLICA, Yard


def sequence(yard: Yard, tokens: list[int]) -> Sequence:
    """A sequence that waits."""
    handle = 900 + len(yard.scheduler.replicas.all_sequences())
    yard.submit(handle, tokens, 5, [])
    return yard.scheduler.replicas.all_sequences()[-1]


def running(yard: Yard) -> list[int]:
    return [worker.rows.running for worker in yard.scheduler.workers.values()]


def compute(yard: Yard, index: int, prompt: list[int]) -> None:
    """Have one worker compute a prompt, whatever the policy says, and end it."""
    place(yard, index, prompt, 1)
    yard.drain()


def place(yard: Yard, index: int, prompt: list[int], answer: int) -> None:
    """Place a prompt on one worker, whatever the policy says."""
    policy = yard.scheduler.policy
    yard.scheduler.policy = lambda workers, sequence, most: [
        choice for choice in least_cost(workers, sequence, most) if choice.worker.hello.index == index
    ]
    yard.submit(1000 + len(yard.finished), prompt, answer, [])
    yard.turn()
    yard.scheduler.policy = policy


def test_prompts_that_share_nothing_spread_evenly() -> None:
    yard = Yard(workers=3, num_blocks=200)
    for handle in range(11):
        yard.submit(handle, [handle + 1], 30, [])
    yard.scheduler.next_steps()
    assert sorted(running(yard)) == [3, 4, 4]


def test_a_prompt_goes_to_the_worker_that_has_its_beginning() -> None:
    yard = Yard(workers=3, num_blocks=200)
    prompt = list(range(40))
    compute(yard, 1, prompt)
    choices = least_cost(list(yard.scheduler.workers.values()), sequence(yard, [*prompt, 41, 42]), 16)
    assert [choice.worker.hello.index for choice in choices] == [1, 0, 2], "the others keep the order of their indices"
    assert [(choice.match, choice.new_tokens, choice.backlog) for choice in choices] == [
        (40, 2, 0),
        (0, 42, 0),
        (0, 42, 0),
    ]
    yard.drain()
    worker = yard.scheduler.workers[1]
    assert (worker.beginnings.placed_tokens, worker.beginnings.saved_tokens) == (82, 40)
    assert yard.scheduler.status().workers[1].saved_tokens == 40
    yard.start_worker(1, epoch=1)
    status = yard.scheduler.status()
    assert status.workers[1].saved_tokens == 0
    assert (status.counters["placed_tokens"], status.counters["saved_tokens"]) == (82, 40), "they never fall"


@pytest.mark.parametrize(("busy", "stay"), [(0, 2), (1, 4)], ids=["the other one is idle", "it is busy"])
def test_a_backlog_that_costs_more_than_the_match_saves_sends_a_prompt_elsewhere(busy: int, stay: int) -> None:
    yard = Yard(replace(LIMITS, max_batch_tokens=8), workers=2, num_blocks=200)
    prompt = list(range(40))
    compute(yard, 0, prompt)
    asked = [*prompt, 41]
    assert TOKENS_OF_A_ROW < 40 - 1 < 2 * TOKENS_OF_A_ROW, "an idle worker counts the prompt once"
    assert 2 * TOKENS_OF_A_ROW < WEIGHT_OF_NEW_TOKENS * 40 < 3 * TOKENS_OF_A_ROW, "a busy one twice, and has a row"
    if busy:
        place(yard, 1, [900], 60)
    for handle in range(stay):
        yard.submit(handle, asked, 20, [])
        yard.scheduler.next_steps()
        assert running(yard) == [handle + 1, busy], "the sequences beside it cost less than the prompt"
    yard.submit(stay, asked, 20, [])
    yard.scheduler.next_steps()
    assert running(yard) == [stay, busy + 1], "now two workers have the prefix"


def test_blocks_that_are_being_computed_count_as_a_match() -> None:
    yard = Yard(replace(LIMITS, max_batch_tokens=8, min_awaited_tokens=8), workers=2, num_blocks=200, max_model_len=200)
    prompt = list(range(120))
    place(yard, 1, [900], 60)
    yard.submit(0, prompt, 5, [])
    yard.scheduler.next_steps()
    first, second = least_cost(list(yard.scheduler.workers.values()), sequence(yard, [*prompt, 121]), 16)
    assert (first.worker.hello.index, first.match, first.new_tokens) == (0, 120, 1)
    assert first.backlog == 112 + TOKENS_OF_A_ROW, "what is left of the first prompt is waited for"
    assert (second.match, second.new_tokens) == (0, 121)
    assert second.new_tokens < first.cost < second.cost, "a prompt that is computed twice delays others, too"


@pytest.mark.parametrize(("step_tokens", "best"), [(400, 1), (399, 0)])
def test_a_crowded_worker_is_spared_unless_its_match_saves_a_full_step(step_tokens: int, best: int) -> None:
    yard = Yard(workers=2, num_blocks=2000, max_model_len=1000)
    prompt = list(range(400))
    compute(yard, 0, prompt)
    yard.scheduler.policy = lambda workers, sequence, most: least_cost(workers[:1], sequence, most)
    for handle in range(ROWS_APART + 1):
        yard.submit(handle, [VOCAB - 1 - handle], 900, [])
    yard.scheduler.next_steps()
    assert running(yard) == [ROWS_APART + 1, 0]
    choices = least_cost(list(yard.scheduler.workers.values()), sequence(yard, [*prompt, 500]), step_tokens)
    assert min(choices, key=lambda choice: choice.cost).worker.hello.index == 0, "by cost alone"
    assert choices[0].worker.hello.index == best


def test_the_log_says_why_a_worker_was_chosen() -> None:
    yard = Yard(workers=2, num_blocks=200)
    compute(yard, 1, list(range(40)))
    params = SamplingParams(seed=0, max_new_tokens=2)
    context = TextContext.from_prompt(range(42), params, request_id=RequestID("asked"))
    yard.scheduler.submit(REPLICA, Submit(0, context))
    yard.drain()
    story = "\n".join(yard.scheduler.request_log.of("asked"))
    assert "admitted to worker 1 (epoch 0), row 0; 40 of 42 tokens were cached" in story
    assert "its cost was 2 tokens to compute and a backlog of 0" in story
    assert "other workers had at most 0 of its tokens, and a backlog of 0 on worker 0" in story


def test_a_restarted_worker_has_nothing_cached_and_is_not_flooded() -> None:
    yard = Yard(workers=2, num_blocks=400, max_model_len=200)
    prompts = [list(range(start, start + 60)) for start in (0, 200, 400, 600)]
    for index, prompt in zip((0, 0, 1, 1), prompts, strict=True):
        compute(yard, index, prompt)
    yard.start_worker(0, epoch=1)
    for handle, prompt in enumerate([*prompts[2:], list(range(100, 160))]):
        yard.submit(handle, [*prompt, 5], 5, [])
    yard.scheduler.next_steps()
    assert yard.scheduler.workers[0].rows.running == 1, "the worker with an empty table gets what no worker has"
    assert yard.scheduler.workers[1].beginnings.saved_tokens == 120, "what worker 1 knows stays there"


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


@pytest.mark.parametrize(
    ("ranks", "width", "problem"),
    [
        (1, 4, None),
        (1, 5, "embeddings must be vectors of 4 finite numbers"),
        (2, 4, "embeddings are not taken by a group of ranks (tensor_parallel 2): send tokens or text"),
    ],
)
def test_embeddings_that_a_worker_cannot_take_are_refused(ranks: int, width: int, problem: str | None) -> None:
    yard = Yard(workers=1)
    assert not yard.scheduler.worker_hello(replace(yard.workers[0].hello, hidden_size=4, ranks=ranks))
    workers = yard.scheduler.workers.values()
    vectors = np.ones((3, width), np.float32)
    context = TextContext.from_prompt([0] * 3, SamplingParams(seed=0), prompt_embeddings=vectors)
    error = placement.misfit(context, workers, None)
    assert error == (None if problem is None else RequestError(ErrorCode.INVALID, problem))
    plain = TextContext.from_prompt([0] * 3, SamplingParams(seed=0))
    assert placement.misfit(plain, workers, None) is None


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
