"""Adapters in the scheduler: lives of names and contents, admission by memory, crashes, and a file that is kept."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interfaces import AdapterState, Finish, LoRAOperation, LoRAStatus, SamplingParams, Submit, TextContext
from scheduler import placement_cost, rebalancing
from scheduler.adapter import AdapterFile
from scheduler.adapter_registry import RETURN_SECONDS
from scheduler.core import Scheduler
from tests.scheduler.adapter_yard import SIZE, AdapterYard
from tests.scheduler.test_core import LIMITS, REPLICA, prompts

SHAPE = {"num_blocks": 40, "block_size": 4, "max_rows": 64, "max_model_len": 80}


def check_answers(yard: AdapterYard) -> None:
    for handle in yard.asked:
        if yard.finished.get(handle) == Finish.LENGTH:
            assert yard.tokens[handle] == yard.expected(handle), handle


def test_one_prompt_with_several_adapters_shares_no_blocks_between_contents() -> None:
    yard = AdapterYard(workers=2)
    assert yard.load("a", 1) is yard.load("b", 2) is LoRAStatus.SUCCESS
    assert yard.load("same as a", 1) is LoRAStatus.SUCCESS
    prompt = prompts(1, 3)[0] * 2
    for handle, name in enumerate(["", "a", "b", "same as a", "a", ""] * 2):
        yard.ask(handle, prompt, 12, name)
        yard.drain() if handle > 5 else yard.turn()
    yard.drain()
    assert set(yard.finished.values()) == {Finish.LENGTH}
    check_answers(yard)
    assert yard.tokens[1] == [*yard.expected(1)] != yard.tokens[2]
    assert yard.cached[11] > 0, "the base model's prompt was meant to be cached"


def test_another_content_under_a_name_never_reads_the_old_ones_blocks() -> None:
    yard = AdapterYard()
    yard.load("a", 1)
    prompt = list(range(1, 25))
    yard.ask(1, prompt, 8, "a")
    yard.drain()
    assert yard.load("a", 2) is LoRAStatus.LOAD_NAME_EXISTS
    assert yard.load("a", 2, replace=True) is LoRAStatus.SUCCESS
    yard.ask(2, prompt, 8, "a")
    yard.drain()
    assert yard.cached.get(2, 0) == 0
    check_answers(yard)
    yard.ask(3, prompt, 8, "a")
    yard.drain()
    assert yard.cached[3] > 0
    yard.settle()
    assert len(yard.worker().loaded) == 1, "the old content has left memory"


def test_requests_that_run_keep_the_content_that_was_replaced_or_unloaded() -> None:
    yard = AdapterYard()
    yard.load("a", 1)
    yard.ask(1, [5, 6, 7], 30, "a")
    for _ in range(5):
        yard.turn()
    assert yard.load("a", 2, replace=True) is LoRAStatus.SUCCESS
    yard.ask(2, [5, 6, 7], 30, "a")
    number = yard.order(LoRAOperation.UNLOAD, "a")
    assert yard.answers[number] is LoRAStatus.SUCCESS
    assert "1 requests" in yard.texts[number]
    assert yard.adapters() == {}
    assert {one.state for one in yard.scheduler.adapters.status()} == {AdapterState.LEAVING}
    yard.settle()
    check_answers(yard)
    assert yard.finished == {1: Finish.LENGTH, 2: Finish.LENGTH}
    assert yard.scheduler.adapters.status() == []
    assert yard.worker().loaded == {}


def test_a_request_for_a_content_that_is_gone_is_refused() -> None:
    yard = AdapterYard()
    yard.load("a", 1)
    context = TextContext.from_prompt([1], SamplingParams(max_new_tokens=3), adapter="a", adapter_digest="1")
    yard.order(LoRAOperation.UNLOAD, "a")
    yard.settle()
    yard.scheduler.submit(REPLICA, Submit(7, context))
    yard.turn()
    assert yard.finished[7] == Finish.FAILED
    assert "'a' was unloaded" in yard.errors[7]


def test_orders_that_cannot_be_carried_out() -> None:
    yard = AdapterYard()
    assert yard.answers[yard.order(LoRAOperation.UNLOAD, "x")] is LoRAStatus.UNLOAD_NAME_NONEXISTENT
    assert yard.answers[yard.order(LoRAOperation.LOAD, "x")] is LoRAStatus.LOAD_INVALID_PATH
    number = yard.order(LoRAOperation.LOAD, "x", "/nowhere")
    again = yard.order(LoRAOperation.LOAD, "x", "/nowhere")
    yard.drain()
    assert yard.answers[again] is LoRAStatus.LOAD_NAME_EXISTS
    assert yard.answers[number] is LoRAStatus.LOAD_INVALID_PATH
    assert yard.scheduler.adapters.status() == []
    assert yard.load("x", 4) is LoRAStatus.SUCCESS


def test_a_model_that_takes_no_adapters_says_so() -> None:
    yard = AdapterYard(memory=0)
    assert yard.load("a", 1) is LoRAStatus.LOAD_ERROR
    assert "takes no adapters" in yard.texts[1]
    assert not yard.scheduler.status().takes_adapters


def test_more_adapters_than_fit_take_turns_and_no_request_is_overtaken() -> None:
    yard = AdapterYard(memory=2 * SIZE, num_blocks=200)
    names = [f"a{i}" for i in range(6)]
    for content, name in enumerate(names, 1):
        assert yard.load(name, content) is LoRAStatus.SUCCESS
    for handle in range(60):
        yard.ask(handle, prompts(1, handle)[0], 10, ["", *names][handle % 7])
    first: list[int] = []
    while yard.turn():
        first += [handle for handle in yard.tokens if handle not in first]
    check_answers(yard)
    assert len(yard.finished) == 60
    assert set(yard.finished.values()) == {Finish.LENGTH}
    assert yard.scheduler.status().counters["adapter_evictions"] >= 6
    # Rows that were placed together may wait for their adapters for different times.
    assert all(abs(place - handle) < 12 for place, handle in enumerate(first)), first


def test_a_pinned_adapter_stays_and_leaves_room_for_one_other() -> None:
    yard = AdapterYard(memory=2 * SIZE)
    assert yard.load("pinned", 1, pinned=True) is LoRAStatus.SUCCESS
    assert yard.load("b", 2) is LoRAStatus.SUCCESS
    assert yard.load("c", 3) is LoRAStatus.SUCCESS
    yard.drain()
    assert set(yard.worker().loaded.values()) == {1, 3}
    assert yard.load("d", 4, pinned=True) is LoRAStatus.LOAD_ERROR
    assert "lora_memory" in yard.texts[4]
    yard.ask(1, [1, 2, 3], 5, "b")
    yard.ask(2, [1, 2, 3], 5, "pinned")
    yard.drain()
    check_answers(yard)
    assert set(yard.worker().loaded.values()) == {1, 2}


def test_an_adapter_can_be_loaded_while_requests_use_all_memory() -> None:
    yard = AdapterYard(memory=SIZE)
    yard.load("a", 1)
    yard.ask(1, [5, 6, 7], 40, "a")
    for _ in range(4):
        yard.turn()
    assert yard.load("a", 2, replace=True) is LoRAStatus.SUCCESS
    assert 1 not in yard.finished
    yard.ask(2, [5, 6, 7], 5, "a")
    yard.drain()
    check_answers(yard)
    assert yard.finished == {1: Finish.LENGTH, 2: Finish.LENGTH}


def test_a_worker_that_finds_another_content_fails_only_that_adapters_requests() -> None:
    yard = AdapterYard()
    yard.load("a", 1)
    yard.load("b", 2)
    yard.disk["/a/1"] = 9
    yard.scheduler.lose_worker(0)
    yard.start_worker(0, epoch=1)
    yard.ask(1, [1, 2, 3], 5, "a")
    yard.ask(2, [1, 2, 3], 5, "b")
    yard.ask(3, [1, 2, 3], 5)
    yard.drain()
    assert yard.finished == {1: Finish.FAILED, 2: Finish.LENGTH, 3: Finish.LENGTH}
    assert "have changed since it was loaded" in yard.errors[1]
    check_answers(yard)
    assert yard.load("a", 9, path="/a/1", replace=True) is LoRAStatus.SUCCESS
    yard.ask(4, [1, 2, 3], 5, "a")
    yard.drain()
    check_answers(yard)
    assert yard.finished[4] == Finish.LENGTH


def test_an_adapter_that_kills_workers_is_given_up() -> None:
    yard = AdapterYard()
    yard.load("a", 1)
    yard.disk["/b"] = 2
    number = yard.order(LoRAOperation.LOAD, "b", "/b")
    for epoch in range(1, 4):
        assert number not in yard.answers
        yard.scheduler.next_steps()
        yard.scheduler.adapters.take_messages()
        yard.scheduler.lose_worker(0)
        yard.start_worker(0, epoch)
    yard.drain()
    assert yard.answers[number] is LoRAStatus.LOAD_ERROR
    assert "workers died" in yard.texts[number]
    yard.ask(1, [1], 3, "a")
    yard.drain()
    assert yard.finished[1] == Finish.LENGTH, "the adapter that was read beside it is not to blame"


def test_a_restarted_scheduler_has_the_adapters_of_its_predecessor(tmp_path: Path) -> None:
    file = AdapterFile(tmp_path / "adapters.json")
    yard = AdapterYard()
    yard.disk |= {"/a": 1, "/b": 2, "/s": 3}
    yard.scheduler = Scheduler(LIMITS, 1, yard.clock, {"start": "/s"}, file)
    assert not yard.scheduler.status().ready
    yard.start_worker(0, epoch=0)
    assert "being loaded" in yard.scheduler.status().reason
    yard.drain()
    assert yard.scheduler.status().ready
    yard.load("a", 1, path="/a", pinned=True)
    yard.load("b", 2, path="/b")
    yard.ask(1, [1, 2, 3], 20, "b")
    yard.turn()
    yard.order(LoRAOperation.UNLOAD, "b")
    assert stat.S_IMODE((tmp_path / "adapters.json").stat().st_mode) == 0o600
    context = TextContext.from_prompt([1, 2, 3], SamplingParams(seed=1, max_new_tokens=20), adapter="b")
    context.adapter_digest = "2"

    yard.scheduler = Scheduler(LIMITS, 2, yard.clock, {"start": "/s"}, file)
    found = {one.name: (one.state, one.pinned) for one in yard.scheduler.adapters.status()}
    ready, leaving = AdapterState.READY, AdapterState.LEAVING
    assert found == {"start": (ready, False), "a": (ready, True), "b": (leaving, False)}
    yard.start_worker(0, epoch=1)
    assert yard.scheduler.status().ready
    yard.scheduler.adapters.sweep()
    yard.tokens.clear()
    yard.scheduler.submit(REPLICA, Submit(1, context, again=True))
    yard.drain()
    assert yard.tokens[1] == yard.expected(1)
    yard.clock.advance(RETURN_SECONDS + 1)
    yard.scheduler.adapters.sweep()
    assert {one.name for one in yard.scheduler.adapters.status()} == {"start", "a"}


def test_an_adapter_of_the_settings_that_cannot_be_used_is_fatal() -> None:
    yard = AdapterYard()
    yard.scheduler = Scheduler(LIMITS, 1, yard.clock, {"start": "/missing"})
    yard.start_worker(0, epoch=0)
    yard.drain()
    assert yard.scheduler.adapters.fatal == ("the adapter 'start' of the setting lora cannot be used: there is nothing")


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"handle": 1}]', '[{"handle": "1", "name": "a", "path": "/a"}]'])
def test_a_file_that_is_broken_is_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "adapters.json"
    path.write_text(text)
    assert AdapterFile(path).read() is None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_walks(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """Adapters come, change, leave, and crash with their workers: every request gets its content's tokens.

    Workers have memory for unequal numbers of adapters, and sequences move between them all the time.
    """
    monkeypatch.setattr(placement_cost, "ROWS_APART", 1)
    monkeypatch.setattr(rebalancing, "LEAST_LEFT", 2)
    monkeypatch.setattr(rebalancing, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(rebalancing, "LASTING_SECONDS", 0.0)
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = random.Random(seed)
    yard = AdapterYard(memory=rng.choice([1, 2, 3]) * SIZE, workers=rng.choice([1, 2]), seed=seed)
    names = ["a", "b", "c", "d"]
    handle = 0
    content = 0
    for _ in range(data.draw(st.integers(5, 60))):
        match rng.choice(["load", "ask", "ask", "turn", "turn", "unload", "kill", "cancel"]):
            case "load":
                content += 1
                name = rng.choice(names)
                yard.disk[f"/{content}"] = content
                yard.order(LoRAOperation.LOAD, name, f"/{content}", replace=rng.random() < 0.5)
            case "ask":
                handle += 1
                known = ["", *yard.adapters()]
                yard.ask(handle, prompts(1, rng.randrange(5))[0], rng.randint(1, 15), rng.choice(known))
            case "turn":
                for _ in range(rng.randint(1, 15)):
                    yard.turn()
            case "unload":
                yard.order(LoRAOperation.UNLOAD, rng.choice(names))
                yard.scheduler.adapters.sweep()
            case "kill":
                index = rng.choice(list(yard.workers))
                yard.restart_worker(index, rng.choice([1, 2, 3]) * SIZE)
                for _ in range(60):
                    yard.scheduler.workers[index].prefill_budget.learn(0, 10, 10.0)
            case "cancel" if handle:
                yard.cancel(rng.randint(1, handle))
    yard.settle()
    check_answers(yard)
    assert all(code == Finish.LENGTH for code in yard.finished.values()), (seed, yard.errors)
    ready = {one.handle for one in yard.scheduler.adapters.status()}
    for index in yard.workers:
        assert yard.worker(index).loaded.keys() <= ready, "an adapter that is gone still takes memory"
    assert not +yard.scheduler.requests.adapter_users
