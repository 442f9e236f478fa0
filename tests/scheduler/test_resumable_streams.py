"""Resumable streams: any replica gets every token from the start, then all further ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces import ErrorCode, Finish, SamplingParams, SchedulingOptions, Submit, TextContext
from scheduler.core import Scheduler
from scheduler.resumable_streams import MAX_ENDED, SECONDS_KEPT
from tests.scheduler.clock import Clock
from tests.scheduler.simulated_worker import SimulatedWorker, naive_generate
from tests.scheduler.test_core import LIMITS

PROMPT, LENGTH = [5, 6, 7], 25


class Ear:
    """One worker, and what each (replica, handle) has heard."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(replace(LIMITS, steps_in_flight=2), 1, self.clock)
        self.worker = SimulatedWorker(0, 0, num_blocks=64, block_size=4, max_rows=8, max_model_len=80)
        self.scheduler.worker_hello(self.worker.hello)
        self.heard: dict[tuple[bytes, int], list[int]] = {}
        self.ended: dict[tuple[bytes, int], int] = {}
        self.errors: dict[tuple[bytes, int], str] = {}
        self.versions: dict[tuple[bytes, int], dict[int, str]] = {}

    def submit(
        self, replica: bytes, handle: int, name: str = "s", prompt: list[int] = PROMPT, tenant: str = ""
    ) -> None:
        params = SamplingParams(seed=1, max_new_tokens=LENGTH)
        context = TextContext.from_prompt(prompt, params)
        self.scheduler.submit(replica, Submit(handle, context, SchedulingOptions(tenant=tenant, resume=name)))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            for _, step in self.scheduler.next_steps():
                self.scheduler.step_result(self.worker.run(step))
            for identity, results in self.scheduler.take_results():
                columns = (results.handles.tolist(), results.tokens.tolist(), results.finished.tolist())
                for handle, token, finished in zip(*columns, strict=True):
                    key = (identity, handle)
                    assert key not in self.ended
                    if token >= 0:
                        self.heard.setdefault(key, []).append(token)
                    if finished:
                        self.ended[key] = finished
                for handle, versions in results.versions.items():
                    self.versions.setdefault((identity, handle), {}).update(versions)
                self.errors |= {(identity, handle): error.code for handle, error in results.errors.items()}


WHOLE = naive_generate(PROMPT, 1, [], len(PROMPT) + LENGTH)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["leave", "replica dies", "stay"])), max_size=5))
def test_a_client_that_comes_back_gets_everything_from_the_start(story: list[tuple[int, str]]) -> None:
    ear = Ear()
    for i, (turns, event) in enumerate(story):
        replica = b"replica %d" % i
        ear.submit(replica, i)
        ear.turn(turns)
        heard = ear.heard.get((replica, i), [])
        assert heard == WHOLE[: len(heard)]
        if event == "leave":
            ear.scheduler.detach(replica, [i])
        elif event == "replica dies":
            ear.scheduler.drop_replica(replica)
        ear.turn(turns // 2)
    ear.submit(b"last", 99)
    ear.turn(40)
    assert ear.heard[b"last", 99] == WHOLE
    assert ear.ended[b"last", 99] == Finish.LENGTH
    assert ear.scheduler.running == 0
    assert ear.scheduler.counters["finished"] == 1, "it was computed once"


def test_the_listener_before_is_cancelled() -> None:
    ear = Ear()
    ear.submit(b"a", 1)
    ear.turn(5)
    ear.submit(b"b", 1)
    ear.turn(40)
    assert ear.ended == {(b"a", 1): Finish.CANCELLED, (b"b", 1): Finish.LENGTH}
    assert ear.heard[b"b", 1] == WHOLE


def test_a_stream_without_a_client_is_cancelled_in_the_end() -> None:
    ear = Ear()
    ear.submit(b"a", 1)
    ear.turn(3)
    ear.scheduler.detach(b"a", [1])
    ear.clock.advance(SECONDS_KEPT - 1)
    ear.scheduler.expire()
    ear.turn()
    assert ear.scheduler.running == 1
    ear.clock.advance(2)
    ear.scheduler.expire()
    assert ear.scheduler.running == 0
    assert ear.scheduler.workers[0].pool.used == 0


def test_without_a_name_leaving_is_cancelling() -> None:
    ear = Ear()
    ear.submit(b"a", 1, name="")
    ear.turn(3)
    ear.scheduler.detach(b"a", [1])
    assert ear.scheduler.running == 0


def test_another_prompt_or_another_key_does_not_get_the_stream() -> None:
    ear = Ear()
    ear.submit(b"a", 1, tenant="owner")
    ear.turn(5)
    ear.submit(b"b", 2, tenant="owner", prompt=[9])
    ear.submit(b"c", 3, tenant="thief")
    ear.turn(60)
    assert ear.errors == {(b"b", 2): ErrorCode.INVALID}
    assert ear.heard[b"a", 1] == ear.heard[b"c", 3] == WHOLE
    assert ear.scheduler.counters["finished"] == 2, "the other key's request was computed for itself"


def test_what_has_ended_is_kept_for_a_while_and_bounded() -> None:
    ear = Ear()
    for i in range(MAX_ENDED + 5):
        ear.submit(b"a", i, name=str(i))
        ear.turn(30)
    assert len(ear.scheduler.streams._ended) == MAX_ENDED
    ear.clock.advance(SECONDS_KEPT + 1)
    ear.scheduler.expire()
    assert not ear.scheduler.streams._ended
    assert not ear.scheduler.streams._open


def test_a_client_that_comes_back_gets_the_versions_of_the_weights() -> None:
    ear = Ear()
    ear.scheduler.requests.version = "100"
    ear.submit(b"first", 1)
    while len(ear.heard.get((b"first", 1), [])) < 5:
        ear.turn()
    ear.scheduler.requests.version = "200"
    first = len(ear.heard[b"first", 1])
    ear.turn(2)
    whole = {0: "100", first: "200"}
    assert ear.versions == {(b"first", 1): whole}
    ear.scheduler.detach(b"first", [1])
    ear.submit(b"second", 2)
    ear.turn(40)
    assert ear.ended[b"second", 2] == Finish.LENGTH
    assert ear.versions[b"second", 2] == whole
    ear.submit(b"third", 3)
    ear.turn()
    assert ear.versions[b"third", 3] == whole, "an answer that has ended has them, too"
