"""Faults around adapters in the scheduler: files that cannot be read again, memory that shrank, deaths at bad times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces import AdapterLoaded, Finish, LoRAOperation, LoRAStatus, SamplingParams, Submit, TextContext
from scheduler.adapter import AdapterFile
from scheduler.adapter_registry import LATE_SECONDS
from scheduler.core import Scheduler
from tests.scheduler.adapter_yard import SIZE, AdapterYard
from tests.scheduler.test_adapters import check_answers
from tests.scheduler.test_core import LIMITS, REPLICA, prompts


@pytest.mark.parametrize("unloads", [True, False])
def test_a_request_on_its_way_gets_the_content_that_it_was_prepared_for(unloads: bool) -> None:
    yard = AdapterYard()
    yard.load("a", 1)
    context = TextContext.from_prompt([5, 6], SamplingParams(seed=7, max_new_tokens=3), adapter="a", adapter_digest="1")
    yard.order(LoRAOperation.UNLOAD, "a") if unloads else yard.load("a", 2, replace=True)
    yard.clock.advance(LATE_SECONDS / 2)
    yard.scheduler.adapters.sweep()
    yard.asked[7] = [5, 6], 1
    yard.max_new[7] = 3
    yard.scheduler.submit(REPLICA, Submit(7, context))
    yard.settle()
    assert yard.finished == {7: Finish.LENGTH}
    check_answers(yard)
    assert len(yard.worker().loaded) == (0 if unloads else 1)


@pytest.mark.parametrize("path", ["/a/1", "/elsewhere"])
def test_an_adapter_that_could_not_be_read_again_works_after_it_was_loaded_in_place(path: str) -> None:
    yard = AdapterYard(workers=2)
    yard.load("a", 1)
    del yard.disk["/a/1"]
    for index in range(2):
        yard.restart_worker(index)
    yard.ask(1, [1, 2, 3], 5, "a")
    yard.drain()
    assert yard.finished[1] == Finish.FAILED
    assert yard.load("a", 1, path=path, replace=True) is LoRAStatus.SUCCESS
    yard.ask(2, [1, 2, 3], 5, "a")
    yard.drain()
    assert yard.finished[2] == Finish.LENGTH
    for index in range(2):
        yard.restart_worker(index)
    yard.ask(3, [1, 2, 3], 5, "a")
    yard.drain()
    assert yard.finished[3] == Finish.LENGTH, "it is read from where it was loaded last"
    check_answers(yard)


def test_an_adapter_that_has_no_room_any_more_fails_only_its_own_requests() -> None:
    yard = AdapterYard()
    yard.load("a", 1)
    yard.restart_worker(memory=SIZE - 1)
    yard.ask(1, [1, 2, 3], 5, "a")
    yard.ask(2, [1, 2, 3], 5)
    yard.drain()
    assert yard.finished == {1: Finish.FAILED, 2: Finish.LENGTH}
    assert "takes 10 bytes, and adapters may take 9" in yard.errors[1]
    assert "raise lora_memory" in yard.errors[1]


def test_a_worker_without_room_for_an_adapter_leaves_it_to_others() -> None:
    yard = AdapterYard(workers=2)
    yard.load("a", 1)
    yard.restart_worker(0, memory=SIZE - 1)
    for handle in range(6):
        yard.ask(handle, [1, 2, handle], 5, "a")
    yard.drain()
    assert set(yard.finished.values()) == {Finish.LENGTH}
    check_answers(yard)


def test_an_adapter_that_pinned_ones_leave_no_room_for_fails_only_its_own_requests() -> None:
    yard = AdapterYard(memory=2 * SIZE)
    assert yard.load("pinned", 1, pinned=True) is LoRAStatus.SUCCESS
    assert yard.load("b", 2) is LoRAStatus.SUCCESS
    yard.restart_worker(memory=2 * SIZE - 1)
    yard.ask(1, [1, 2, 3], 5, "b")
    yard.ask(2, [1, 2, 3], 5, "pinned")
    yard.ask(3, [1, 2, 3], 5)
    yard.drain()
    assert yard.finished == {1: Finish.FAILED, 2: Finish.LENGTH, 3: Finish.LENGTH}
    assert "of which pinned ones take 10" in yard.errors[1]
    check_answers(yard)
    yard.order(LoRAOperation.UNLOAD, "pinned")
    yard.ask(4, [1, 2, 3], 5, "b")
    yard.drain()
    assert yard.finished[4] == Finish.LENGTH


def test_the_next_order_is_carried_out_when_the_last_one_ends_with_a_worker() -> None:
    yard = AdapterYard(workers=2)
    yard.disk |= {"/a": 1, "/b": 2}
    first = yard.order(LoRAOperation.LOAD, "a", "/a")
    second = yard.order(LoRAOperation.LOAD, "b", "/b")
    for index, message in yard.scheduler.adapters.take_messages():
        yard.worker(index).obey(message)
    answer = yard.worker(0).read()
    assert isinstance(answer, AdapterLoaded)
    yard.scheduler.adapters.loaded(answer)
    assert first not in yard.answers
    yard.scheduler.lose_worker(1, blamed=False)
    del yard.workers[1]
    yard.drain()
    assert [yard.answers.get(number) for number in (first, second)] == [LoRAStatus.SUCCESS] * 2


def test_a_scheduler_that_dies_during_the_start_is_followed_by_one_that_reads_all_adapters(tmp_path: Path) -> None:
    file = AdapterFile(tmp_path / "adapters.json")
    yard = AdapterYard()
    yard.disk |= {"/s": 3, "/t": 4}
    wanted = {"s": "/s", "t": "/t"}
    yard.scheduler = Scheduler(LIMITS, 1, yard.clock, wanted, file)
    yard.start_worker(0, epoch=0)
    while "s" not in yard.adapters():
        assert yard.turn()
    assert not yard.scheduler.status().ready
    yard.scheduler = Scheduler(LIMITS, 2, yard.clock, wanted, file)
    yard.start_worker(0, epoch=1)
    assert not yard.scheduler.status().ready
    yard.drain()
    assert yard.scheduler.status().ready
    assert yard.adapters().keys() == {"s", "t"}
    kept = Scheduler(LIMITS, 3, yard.clock, {}, file).adapters.status()
    assert {one.name for one in kept} == {"s", "t"}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_request_ends_whatever_files_and_memory_do(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = random.Random(seed)
    yard = AdapterYard(memory=3 * SIZE, workers=rng.choice([1, 2]), seed=seed)
    paths = {"a": "/a", "b": "/b", "c": "/c"}
    for _ in range(data.draw(st.integers(5, 50))):
        name = rng.choice(list(paths))
        match rng.choice(["load", "ask", "ask", "turn", "unload", "restart", "lose", "find"]):
            case "load":
                yard.disk[paths[name]] = ord(name)
                options = {"replace": rng.random() < 0.7, "pinned": rng.random() < 0.3}
                yard.order(LoRAOperation.LOAD, name, paths[name], **options)
            case "ask":
                handle = len(yard.asked)
                known = ["", *yard.adapters()]
                yard.ask(handle, prompts(1, rng.randrange(5))[0], rng.randint(1, 15), rng.choice(known))
            case "turn":
                for _ in range(rng.randint(1, 15)):
                    yard.turn()
            case "unload":
                yard.order(LoRAOperation.UNLOAD, name)
            case "restart":
                yard.restart_worker(rng.choice(list(yard.workers)), rng.choice([SIZE - 1, SIZE, 3 * SIZE]))
            case "lose":
                yard.disk.pop(paths[name], None)
            case "find":
                yard.disk[paths[name]] = ord(name)
    yard.settle()
    check_answers(yard)
    assert yard.finished.keys() == yard.asked.keys(), seed
    failed = [handle for handle, code in yard.finished.items() if code != Finish.LENGTH]
    for handle in failed:
        assert "cannot be used" in yard.errors[handle] or "lora_memory" in yard.errors[handle], (seed, yard.errors)
    assert all(yard.asked[handle][1] for handle in failed), "requests for the base were meant to be left alone"
