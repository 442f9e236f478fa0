"""Steps in flight: results reach their owners, wrong guesses leave no trace, and a late step is late."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces import SamplingParams, Step, StepResult, Submit, TextContext
from interfaces.messages.logprob_reports import LogprobReports
from interfaces.messages.token_runs import TokenRuns
from scheduler.batch import build_step
from scheduler.in_flight import NewTokens
from scheduler.sequence import Sequence
from scheduler.step_deadline import FIRST_STEP_SECONDS, PATIENCE
from scheduler.workers import Worker
from tests.scheduler.clock import Clock
from tests.scheduler.simulated_worker import SimulatedWorker

NONE = np.empty(0, np.int32)
LEAST = 15.0
TOKEN = 7


class Bench:
    """A worker. Every prompt is one token, so that every step samples for all its rows."""

    def __init__(self, rows: int = 4, blocks: int = 400) -> None:
        self.clock = Clock()
        device = SimulatedWorker(0, 0, num_blocks=blocks, block_size=4, max_rows=rows, max_model_len=10_000)
        self.worker = Worker(device.hello, rows, prefix_cache=False, stall_seconds=LEAST, clock=self.clock)
        self.table = self.worker.rows
        self.steps = self.worker.in_flight
        self.received: Counter[int] = Counter()
        self._joined = 0

    def join(self, limit: int = 10_000, **params: int) -> int | None:
        """Places a new sequence; its row, or None when all rows are taken."""
        context = TextContext.from_prompt([1], SamplingParams(**params))  # type: ignore[arg-type]
        sequence = Sequence.of(b"replica", Submit(self._joined, context), self._joined, self.clock)
        self._joined += 1
        return sequence.row if self.worker.place(sequence, 0, limit, spare=0) else None

    def send(self, most_guesses: int = 0) -> Step:
        step = build_step(self.worker, 1, 10_000, most_guesses, lambda _: pytest.fail("blocks are plenty"))
        assert step is not None
        return step

    def result(self, step: Step, **fields: object) -> NewTokens:
        """The result of `step` comes, and its tokens are appended."""
        tokens = np.full(len(step.rows), TOKEN, np.int32)
        made = StepResult(1, 0, 0, step.step, step.rows, tokens, None, {}, device_us=1)
        new = self.worker.receive(replace(made, **fields))  # type: ignore[arg-type]
        for row in new.rows.tolist():
            for token in [TOKEN, *new.following.get(row, ())]:
                self.owner(row).context.tokens.advance_with_token(int(token))
        return new

    def owner(self, row: int) -> Sequence:
        return self.table.sequence(row)

    def promised(self, row: int) -> int:
        """Results still to come that hold a token of the row's owner."""
        version = self.table.version[row]
        return sum(version in step.sampling_versions[step.sampling == row].tolist() for step in self.steps.steps)

    def check(self) -> None:
        for row in self.table.occupied().tolist():
            known = len(self.owner(row).tokens) + self.promised(row)
            assert self.table.num_tokens[row] == known
            assert self.table.num_computed_tokens[row] == known - 1
            granted = sum(
                int(step.ahead[(step.rows == row) & (step.versions == self.table.version[row])].sum())
                for step in self.steps.steps
                if step.ahead is not None
            )
            assert self.table.ahead[row] == granted
            assert known - 1 + granted <= self.table.num_blocks[row] * self.worker.block_size
            assert known + granted <= self.table.limit[row]


class Device:
    """Does the steps of a bench in their order, and guesses some tokens right."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.sent: deque[tuple[Step, list[Sequence]]] = deque()

    def send(self, most_guesses: int) -> None:
        step = self.bench.send(most_guesses)
        self.sent.append((step, [self.bench.owner(row) for row in step.rows.tolist()]))

    def answer(self, right: int) -> None:
        """The result of the oldest step, in which up to `right` guesses were right."""
        step, owners = self.sent.popleft()
        table = self.bench.table
        wanted = [row for row, owner in zip(step.rows.tolist(), owners, strict=True) if table.sequences[row] is owner]
        ahead = np.zeros(len(step.rows), np.int32) if step.ahead is None else step.ahead
        guessed = {row: min(right, room) for row, room in zip(step.rows.tolist(), ahead.tolist(), strict=True)}
        runs = {row: [TOKEN] * count for row, count in guessed.items() if count}
        logprobs = np.arange(sum(guessed.values()), dtype=np.float32)
        new = self.bench.result(step, more=TokenRuns.of(runs) if runs else None, more_logprobs=logprobs)
        assert new.rows.tolist() == wanted
        expected = {row: guessed[row] for row in wanted if guessed[row]}
        assert {row: len(run) for row, run in new.following.items()} == expected
        assert {row: len(run) for row, run in new.following_logprobs.items()} == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_results_reach_their_owners_and_wrong_guesses_leave_no_trace(data: st.DataObject) -> None:
    bench = Bench()
    device = Device(bench)
    bench.join(data.draw(st.integers(100, 200)))
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["send", "answer", "answer", "join", "leave"])):
            case "send" if bench.table.running and len(device.sent) < 3:
                device.send(data.draw(st.integers(0, 6)))
            case "answer" if device.sent:
                device.answer(data.draw(st.integers(0, 6)))
            case "join":
                bench.join()
            case "leave" if bench.table.running:
                bench.worker.remove(data.draw(st.sampled_from(bench.table.occupied().tolist())))
        bench.check()
    while device.sent:
        device.answer(data.draw(st.integers(0, 6)))
        bench.check()
    assert not bench.steps.steps


def test_rows_get_room_for_guesses_and_none_beyond_their_limit_or_the_blocks() -> None:
    bench = Bench(rows=2, blocks=3)
    row = bench.join(limit=7)
    assert row == 0
    first = bench.send(6)
    assert first.ahead is not None
    assert first.ahead.tolist() == [5], "the limit is 7: a prompt of one, its own token, and five"
    bench.result(first, more=TokenRuns.of({0: [TOKEN] * 4}))
    assert bench.send(6).ahead is None, "it has 6 tokens, and its own is the last"
    bench.worker.remove(0)
    bench.join()
    bench.join()
    both = bench.send(6)
    assert both.ahead is not None
    assert both.ahead.tolist() == [3, 3], "the third block is left: each of the two may need it next"
    bench.worker.remove(1)
    second = bench.send(20)
    assert second.ahead is not None
    assert second.ahead.tolist() == [7], "three blocks of four hold two steps, three guesses, and these"


def test_guesses_that_do_not_fit_their_step_are_an_error() -> None:
    bench = Bench()
    bench.join()
    for more in (TokenRuns.of({0: [TOKEN] * 4}), TokenRuns.of({1: [TOKEN]})):
        with pytest.raises(ValueError, match=r"the guesses of step \d do not fit it"):
            bench.result(bench.send(3), more=more)
    with pytest.raises(ValueError, match=r"step \d has 1 log-probabilities of 2 guesses"):
        bench.result(bench.send(3), more=TokenRuns.of({0: [TOKEN] * 2}), more_logprobs=np.zeros(1, np.float32))


def test_a_worker_that_does_not_guess_gets_no_room() -> None:
    bench = Bench()
    bench.worker.hello = replace(bench.worker.hello, guesses=False)
    bench.join()
    assert bench.send(6).ahead is None


@pytest.mark.parametrize("wrong", [-1, 1])
def test_results_come_in_the_order_of_their_steps(wrong: int) -> None:
    bench = Bench()
    bench.join()
    bench.result(bench.send())
    step = bench.send()
    bench.send()
    with pytest.raises(ValueError, match="answers no step in flight"):
        bench.result(replace(step, step=step.step + wrong))
    bench.result(step)


def test_reports_and_errors_of_an_earlier_owner_are_left_out() -> None:
    bench = Bench(rows=2)
    rows = [bench.join(top_logprobs=1), bench.join(top_logprobs=1)]
    assert rows == [0, 1]
    step = bench.send()
    bench.worker.remove(0)
    assert bench.join(top_logprobs=1) == 0
    column = np.array([0, 1], np.int32)
    ones = np.ones(2, np.int32)
    values = np.zeros(2, np.float32)
    reports = LogprobReports(column, column, values, ones, ones, column, values)
    new = bench.result(step, reports=reports, errors={0: "broken", 1: "broken, too"})
    assert new.rows.tolist() == [], "a row that fails gets no token"
    assert new.reports is not None
    assert new.reports.owners.tolist() == [1]
    assert new.failed == {1: "broken, too"}


def test_broken_columns_are_an_error() -> None:
    bench = Bench()
    bench.join(top_logprobs=1)
    column = np.zeros(1, np.int32)
    values = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="the reports of step 1 do not fit together"):
        bench.result(bench.send(), reports=LogprobReports(column, column, values, column, column, column, values))
    forced = TokenRuns(column, np.array([2], np.int32), column)
    with pytest.raises(ValueError, match="the forced tokens of a step do not fit together"):
        bench.result(bench.send(), forced=forced)


@given(st.integers(1, 6), st.integers(0, 3))
def test_forced_tokens_take_the_place_of_those_that_steps_in_flight_would_sample(run: int, further: int) -> None:
    bench = Bench()
    row, other = bench.join(), bench.join()
    assert row is not None
    assert other is not None
    step = bench.send()
    for _ in range(further):
        bench.send()
    before = bench.table.num_tokens.copy()
    new = bench.result(step, forced=TokenRuns.of({row: [3] * run}))
    assert [tokens.tolist() for tokens in new.following.values()] == [[3] * run]
    assert bench.table.num_tokens[row] == before[row] + max(0, run - further)
    assert bench.table.num_tokens[other] == before[other]


def test_forced_tokens_of_a_row_that_has_ended_are_left_out() -> None:
    bench = Bench()
    row = bench.join()
    assert row is not None
    step = bench.send()
    bench.worker.remove(row)
    assert bench.result(step, forced=TokenRuns.of({row: [3, 3]})).following == {}


def test_those_computed_now_are_the_current_owners_of_rows_in_flight() -> None:
    bench = Bench(rows=2)
    bench.join()
    bench.join()
    step = bench.send()
    bench.send()
    bench.worker.remove(0)
    bench.join()
    assert bench.steps.computing() == [bench.owner(1)]
    bench.result(step)
    assert bench.steps.computing() == [bench.owner(1)]


@given(st.floats(0.01, 20.0), st.floats(0.0, 400.0))
def test_a_step_is_late_when_it_takes_much_longer_than_those_before(usual: float, waited: float) -> None:
    bench = Bench()
    bench.join()
    assert bench.worker.lateness() is None, "an idle worker is never late"
    first = bench.send()
    bench.clock.advance(FIRST_STEP_SECONDS - 1)
    assert bench.worker.lateness() is None, "the first step may compile"
    bench.clock.advance(usual + 1 - FIRST_STEP_SECONDS)
    bench.result(first)
    bench.send()
    bench.clock.advance(waited)
    allowed = LEAST + PATIENCE * (usual + 1e-4)
    if waited < allowed - 0.1:
        assert bench.worker.lateness() is None
    elif waited > allowed + 0.1:
        late = bench.worker.lateness()
        assert late is not None
        assert late == pytest.approx((waited, allowed), abs=0.01)
        bench.worker.grant_grace()
        assert bench.worker.lateness() is None, "the time counts from now"


def test_the_time_of_a_step_begins_with_the_result_before_it() -> None:
    bench = Bench()
    bench.join()
    first = bench.send()
    second = bench.send()
    bench.send()
    bench.clock.advance(5.0)
    bench.result(first)
    bench.clock.advance(1.0)
    bench.result(second)
    bench.clock.advance(LEAST + PATIENCE * 5.0 - 0.1)
    assert bench.worker.lateness() is None
    bench.clock.advance(0.2)
    assert bench.worker.lateness() is not None


def test_an_error_counts_whether_its_row_samples_or_not() -> None:
    """One that fails in the midst of its prompt would go on from what was not computed."""
    bench = Bench()
    context = TextContext.from_prompt([1] * 8, SamplingParams())
    bench.worker.place(Sequence.of(b"replica", Submit(0, context), 0, bench.clock), 0, 100, spare=0)
    step = build_step(bench.worker, 1, 4, 0, lambda _: None)
    assert step is not None
    assert step.ntok is not None
    assert step.ntok.tolist() == [4]
    new = bench.worker.receive(StepResult(1, 0, 0, step.step, NONE, NONE, None, {0: "broken"}, 1))
    assert (new.rows.tolist(), new.failed) == ([], {0: "broken"})


def test_nothing_is_learnt_from_steps_without_the_rows_that_are_lost() -> None:
    bench = Bench(rows=2)
    bench.join()
    bench.join()
    lost = bench.send()
    meanwhile = bench.send()
    one = np.array([0], np.int32)
    bench.result(lost, rows=one, tokens=one, again=np.array([1], np.int32))
    bench.worker.remove(1)
    bench.result(meanwhile, rows=one, tokens=one)
    assert not bench.worker.prefill_budget.knows(2)
    assert bench.steps._deadline.allowed(1) == FIRST_STEP_SECONDS
    bench.clock.advance(0.5)
    bench.result(bench.send())
    assert bench.worker.prefill_budget.knows(1)
    assert bench.steps._deadline.allowed(1) < FIRST_STEP_SECONDS


def test_rows_that_a_worker_has_lost_are_those_of_their_owners() -> None:
    bench = Bench(rows=3)
    assert [bench.join(), bench.join(), bench.join()] == [0, 1, 2]
    first = bench.send()
    second = bench.send()
    bench.worker.remove(0)
    bench.join()
    both = np.array([0, 1], np.int32)
    last = np.array([2], np.int32)
    new = bench.result(first, rows=last, tokens=last, again=both)
    assert (new.rows.tolist(), new.again) == ([2], [1])
    bench.worker.remove(1)
    # It was sent before that was known.
    new = bench.result(second, rows=last, tokens=last)
    assert (new.rows.tolist(), new.again) == ([2], [])
    with pytest.raises(ValueError, match=r"step \d has lost rows that it did not have"):
        bench.result(bench.send(), again=np.array([1], np.int32))
