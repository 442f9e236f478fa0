"""Requests of the lowest priority: they run while nothing else does, and no other request waits for them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from interfaces import LOWEST_PRIORITY, SamplingParams, SchedulingOptions, Step, Submit, TextContext, decode, encode
from scheduler import background
from scheduler.limits import Limits
from scheduler.prefill_budget import MIN_PREFILL_TOKENS, PREFILL_SHARE, PrefillBudget
from scheduler.rows import BACKGROUND_ORDER
from scheduler.stillness import LOOK_SECONDS, STUCK_SECONDS
from tests.scheduler.simulated_worker import VOCAB, naive_generate
from tests.scheduler.test_core import LIMITS, REPLICA, Yard

# Seconds of a step, of each row in decode and of each token of a prompt in it.
STEP, ROW, TOKEN = 0.008, 0.001, 0.0004
PROMPT = 20
ANSWER = 30
# Handles of requests in the background begin here.
BACKGROUND = 1000


class TimedYard(Yard):
    """One worker whose steps take their time, and the times at which tokens came."""

    def __init__(self, limits: Limits = LIMITS, **shape: int) -> None:
        super().__init__(limits, **({"num_blocks": 2000} | shape))
        self.sent: dict[int, float] = {}
        self.times: dict[int, list[float]] = defaultdict(list)
        self.steps: list[tuple[int, int]] = []
        self.expected: dict[int, list[int]] = {}

    def ask(self, handle: int, seed: int | None = None, length: int = PROMPT, answer: int = ANSWER) -> None:
        rng = random.Random(handle if seed is None else seed)
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        params = SamplingParams(seed=handle, max_new_tokens=answer)
        scheduling = SchedulingOptions(priority=LOWEST_PRIORITY if handle >= BACKGROUND else 0)
        self.sent[handle] = self.clock.now
        self.scheduler.submit(REPLICA, Submit(handle, TextContext.from_prompt(prompt, params), scheduling))
        self.expected[handle] = naive_generate(prompt, handle, [], length + answer)

    def begin(self) -> None:
        for index, step in self.scheduler.next_steps():
            self.in_flight[index].append(step)

    def turn(self) -> bool:
        self.begin()
        steps = self.in_flight[0]
        if steps:
            self._run(steps.popleft())
        before = {handle: len(tokens) for handle, tokens in self.tokens.items()}
        self._read_results()
        for handle, tokens in self.tokens.items():
            self.times[handle] += [self.clock.now] * (len(tokens) - before.get(handle, 0))
        self.check_blocks()
        return bool(before) or bool(steps) or self.scheduler.running > 0

    def _run(self, step: Step) -> None:
        ntok = np.ones(len(step.rows), np.int32) if step.ntok is None else step.ntok
        decoding = int((ntok == 1).sum())
        self.steps.append((decoding, int(ntok.sum()) - decoding))
        result = self.workers[0].run(step)
        self.clock.advance(STEP + ROW * decoding + TOKEN * self.steps[-1][1])
        self.scheduler.step_result(decode(encode(result)))

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if condition():
                return
            self.turn()
        raise AssertionError("it does not come")

    def until_token(self, handle: int) -> None:
        self.until(lambda: handle in self.tokens)

    def until_end(self, handle: int) -> None:
        self.until(lambda: handle in self.finished)

    def finish(self) -> None:
        self.until(lambda: len(self.finished) == len(self.sent))
        assert self.errors == {}
        assert self.tokens == self.expected
        assert all(worker.pool.used == 0 for worker in self.scheduler.workers.values())

    def closed_loop(self, users: int, requests: int) -> None:
        """Each user sends one request after the other."""
        mine = {user: user * requests for user in range(users)}
        for handle in mine.values():
            self.ask(handle)
        while mine:
            self.turn()
            for user in [user for user, handle in mine.items() if handle in self.finished]:
                if (mine[user] + 1) % requests:
                    mine[user] += 1
                    self.ask(mine[user])
                else:
                    del mine[user]

    def p99(self) -> dict[str, float]:
        """Of users' requests: time to the first token, between tokens, and to the end."""
        users = {handle: times for handle, times in self.times.items() if handle < BACKGROUND}
        firsts = [times[0] - self.sent[handle] for handle, times in users.items()]
        ends = [times[-1] - self.sent[handle] for handle, times in users.items()]
        between = [float(gap) for times in users.values() for gap in np.diff(times)]
        named = {"first": firsts, "between": between, "end": ends}
        return {name: float(np.percentile(values, 99)) for name, values in named.items()}


def limits() -> Limits:
    return replace(LIMITS, max_batch_tokens=256)


def test_users_wait_no_longer_beside_a_batch() -> None:
    alone, beside = TimedYard(limits()), TimedYard(limits())
    alone.closed_loop(4, 15)
    for handle in range(BACKGROUND, BACKGROUND + 40):
        beside.ask(handle)
    beside.until(lambda: len(beside.tokens) >= 20)
    beside.closed_loop(4, 15)
    ours = alone.p99()
    for name, value in beside.p99().items():
        assert value <= 1.1 * ours[name], f"{name}: {value} beside a batch, {ours[name]} alone"
    beside.finish()
    assert max(rows for rows, _ in beside.steps) > 4, "the batch goes on together when the users have gone"


def test_who_comes_to_a_batch_waits_for_one_short_step() -> None:
    yard = TimedYard(limits())
    yard.closed_loop(4, 2)
    for handle in range(BACKGROUND, BACKGROUND + 64):
        yard.ask(handle, length=40)
    yard.until(lambda: len(yard.tokens) >= 8 + 30)
    for handle in range(100, 110):
        for _ in range(handle % 7):
            yard.turn()
        yard.begin()
        assert len(yard.in_flight[0]) <= 1
        ahead = len(yard.steps) + len(yard.in_flight[0])
        yard.ask(handle)
        yard.until_token(handle)
        long = any(background_steps_are_long(number) for number in range(ahead - 2, ahead + 2))
        own = STEP + TOKEN * PROMPT + ROW
        # Rows are counted in powers of two, so their step may take twice as long as the one that was measured.
        share = PREFILL_SHARE * (background.LONG_STEP if long else 1)
        longest = ((4 if long else 2) + share) * background.STEP_SECONDS
        assert yard.times[handle][0] - yard.sent[handle] <= longest + own
        yard.until_end(handle)
    yard.finish()


def test_no_step_of_a_batch_is_as_long_as_the_operator_allows() -> None:
    """Long prompts alone: without a limit each of the longer steps has all of a step's tokens."""
    yard = TimedYard(replace(LIMITS, max_batch_tokens=2048), max_model_len=2500)
    yard.closed_loop(2, 2)
    yard.until(lambda: yard.scheduler.running == 0)
    begun = len(yard.steps)
    for handle in range(BACKGROUND, BACKGROUND + 8):
        yard.ask(handle, length=2000, answer=2)
    numbers = range(begun, begun + 2 * background.STEPS_BETWEEN_LONG_ONES + 10)
    yard.until(lambda: len(yard.steps) >= numbers.stop)
    # The token's time, with its share of the step's own, is what was measured.
    assert any(tokens > 0 for _, tokens in yard.steps[begun : numbers.stop])
    most = background.LONG_STEP * PREFILL_SHARE * background.STEP_SECONDS / TOKEN
    assert max(tokens for _, tokens in yard.steps[begun : numbers.stop]) <= most


def test_a_users_request_is_placed_as_if_no_batch_were_there() -> None:
    yard = Yard(limits(), workers=2, num_blocks=2000)
    first, second = yard.scheduler.workers.values()

    def ask(handle: int, priority: int) -> None:
        prompt = [random.Random(handle).randrange(VOCAB) for _ in range(PROMPT)]
        context = TextContext.from_prompt(prompt, SamplingParams(seed=handle, max_new_tokens=ANSWER))
        yard.scheduler.submit(REPLICA, Submit(handle, context, SchedulingOptions(priority=priority)))

    ask(0, 0)
    yard.scheduler.next_steps()
    for handle in range(BACKGROUND, BACKGROUND + 20):
        ask(handle, LOWEST_PRIORITY)
    yard.scheduler.next_steps()
    assert [worker.rows.background for worker in (first, second)] == [0, 20]
    for handle in range(1, 6):
        ask(handle, 0)
    yard.scheduler.next_steps()
    assert [worker.rows.running - worker.rows.background for worker in (first, second)] == [3, 3]


def background_steps_are_long(number: int) -> bool:
    return number % background.STEPS_BETWEEN_LONG_ONES == background.STEPS_BETWEEN_LONG_ONES - 1


def test_rows_of_a_batch_stand_still_beside_others() -> None:
    yard = TimedYard(limits())
    for handle in range(BACKGROUND, BACKGROUND + 3):
        yard.ask(handle)
    yard.until(lambda: len(yard.tokens) == 3)
    yard.ask(0)
    yard.until(lambda: 0 in yard.tokens)
    stood = {handle: len(tokens) for handle, tokens in yard.tokens.items()}
    yard.until(lambda: 0 in yard.finished)
    moved = [len(tokens) - stood[handle] for handle, tokens in yard.tokens.items() if handle >= BACKGROUND]
    assert max(moved) <= 1, "only what was in flight when the other came"
    assert yard.scheduler.counters["preemptions"] == 0
    yard.finish()


@pytest.mark.parametrize("shape", [{"max_rows": 4}, {"num_blocks": 40}])
def test_they_give_their_places_to_others(shape: dict[str, int]) -> None:
    yard = TimedYard(limits(), **shape)
    for handle in range(BACKGROUND, BACKGROUND + 4):
        yard.ask(handle)
    yard.until(lambda: len(yard.tokens) == len(yard.sent) if "max_rows" in shape else len(yard.tokens) >= 2)
    for handle in range(4):
        yard.ask(handle)
    yard.begin()
    table = yard.scheduler.workers[0].rows
    assert table.running - table.background >= 3
    assert yard.scheduler.counters["preemptions"] > 0
    assert any("wanted its place" in line for line in yard.scheduler.request_log.of(""))
    yard.until(lambda: all(handle in yard.finished for handle in range(4)))
    assert not any(handle in yard.finished for handle in yard.sent if handle >= BACKGROUND)
    yard.finish()


def test_one_that_returns_is_behind_all_others() -> None:
    yard = TimedYard(limits(), max_rows=1)
    yard.ask(BACKGROUND)
    yard.until(lambda: BACKGROUND in yard.tokens)
    yard.ask(0)
    yard.until(lambda: 0 in yard.tokens)
    yard.ask(1)
    yard.ask(BACKGROUND + 1)
    yard.finish()
    ends = sorted(yard.times, key=lambda handle: yard.times[handle][-1])
    assert ends == [0, 1, BACKGROUND, BACKGROUND + 1]


def test_one_whose_beginning_another_wants_goes_on() -> None:
    """Otherwise both would wait for ever."""
    yard = TimedYard(replace(LIMITS, max_batch_tokens=16, min_awaited_tokens=8), max_model_len=200)
    yard.ask(BACKGROUND, seed=1, length=120)
    yard.turn()
    yard.ask(0, seed=1, length=120)
    yard.until(lambda: 0 in yard.finished)
    assert BACKGROUND not in yard.finished
    assert yard.cached[0] > 16, "it has waited for the other's blocks"
    yard.finish()


def test_who_stands_still_for_long_is_not_stuck() -> None:
    yard = TimedYard(limits())
    yard.ask(BACKGROUND)
    yard.until(lambda: BACKGROUND in yard.tokens)
    handle = 0
    begun = yard.clock.now
    yard.ask(handle)
    while yard.clock.now < begun + STUCK_SECONDS + 5 * LOOK_SECONDS:
        yard.turn()
        if handle in yard.finished:
            handle += 1
            yard.ask(handle)
        yard.clock.advance(LOOK_SECONDS)
        yard.scheduler.look_for_stuck()
    assert BACKGROUND not in yard.finished
    yard.finish()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_every_request_gets_its_tokens(seed: int) -> None:
    rng = random.Random(seed)
    yard = TimedYard(replace(LIMITS, steps_in_flight=rng.choice([1, 2])), num_blocks=rng.choice([30, 60]))
    handles = [*range(8), *range(BACKGROUND, BACKGROUND + 12)]
    rng.shuffle(handles)
    while handles:
        yard.ask(handles.pop(), length=rng.randint(1, 40), answer=rng.randint(1, 40))
        for _ in range(rng.randrange(30)):
            beside = yard.scheduler.workers[0].rows
            yard.begin()
            if beside.running > beside.background and yard.in_flight[0]:
                last = yard.in_flight[0][-1]
                owners = beside.order[last.rows[beside.in_use[last.rows]]]
                awaited = yard.scheduler.workers[0].prefix_waits.oldest_waiting()
                assert not any(order >= BACKGROUND_ORDER for order in owners) or awaited or len(yard.in_flight[0]) < 2
            yard.turn()
    yard.finish()


def test_how_many_rows_and_tokens_are_a_short_step() -> None:
    budget = PrefillBudget()
    assert budget.rows_within(0.025) is None
    assert budget.tokens_within(0.025) is None
    for rows, seconds in ((1, 0.01), (8, 0.02), (16, 0.03), (64, 0.1)):
        budget.learn(rows, 0, seconds)
    budget.learn(0, 100, 0.05)
    assert budget.knows(0)
    assert budget.knows(20)
    assert not budget.knows(4)
    assert budget.rows_within(0.025) == 15
    assert budget.tokens_within(0.025) == 50
    assert budget.rows_within(1.0) is None
    assert budget.rows_within(0.001) == 15, "twice the shortest step is allowed"
    assert budget.tokens_within(1e-9) == 40
    assert budget.tokens_within(1e-9, 0.5) == 20
    slow = PrefillBudget()
    slow.learn(0, 10, 100.0)
    assert slow.tokens_within(0.025) == MIN_PREFILL_TOKENS
