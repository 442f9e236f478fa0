"""Weights in the scheduler: two-part changes, what becomes of requests, workers that follow, and what outlives it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interfaces import (
    KV_CACHE,
    WEIGHTS,
    GroupSpec,
    RunningMode,
    TensorSpec,
    WeightsAction,
    WeightsAnswer,
    WeightsCommand,
    WeightsOrder,
    WeightsReport,
    WeightsTask,
)
from scheduler.core import Scheduler
from shared.weights_file import WeightsFile
from tests.scheduler.test_core import LIMITS, REPLICA, Yard

PROMPT = list(range(1, 13))


class Trainer:
    """A yard whose workers answer commands about weights, and whose operator gives orders."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.yard = Yard()
        self.yard.workers.clear()
        self.file = WeightsFile(folder / "weights.json", folder / "uploads")
        self.yard.scheduler = Scheduler(LIMITS, 1, self.yard.clock, weights_file=self.file)
        self.sent: list[tuple[int, WeightsCommand]] = []
        self.last = 0
        for index in range(workers):
            self.yard.start_worker(index, epoch=0)

    @property
    def weights(self) -> Any:
        return self.yard.scheduler.weights

    def order(self, action: int, **fields: Any) -> None:
        self.last += 1
        self.weights.obey(REPLICA, WeightsOrder(self.last, action, **fields))

    def update(self, **fields: Any) -> None:
        self.order(WeightsAction.UPDATE, source="/new", **fields)

    def take(self) -> list[tuple[int, int]]:
        """Workers and tasks that were sent since the last call."""
        self.weights.advance()
        sent = self.weights.take_messages()
        self.sent = [one for one in self.sent if one[1].task != WeightsTask.ABANDON] + sent
        return [(index, message.task) for index, message in sent]

    def answer(self, index: int, error: str = "", stamp: str = "s") -> str:
        """Let a worker answer its oldest command."""
        place = next(i for i, (owner, _) in enumerate(self.sent) if owner == index)
        _, command = self.sent.pop(place)
        worker = self.yard.scheduler.workers[index]
        report = WeightsReport(1, worker.hello.epoch, index, command.number, error, stamp)
        problem: str = self.weights.heard(report)
        return problem

    def answer_all(self) -> None:
        while self.take() or self.sent:
            for index in {owner for owner, _ in self.sent}:
                self.answer(index)

    def answers(self) -> list[WeightsAnswer]:
        return [answer for _, answer in self.weights.take_answers()]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_all_prepare_before_any_uses(trainer: Trainer) -> None:
    trainer.update(version="v")
    assert trainer.take() == [(0, WeightsTask.PREPARE), (1, WeightsTask.PREPARE)]
    trainer.answer(0)
    assert (trainer.take(), trainer.answers()) == ([], [])
    assert trainer.file.read().version.number == 0
    trainer.answer(1)
    assert trainer.take() == [(0, WeightsTask.USE), (1, WeightsTask.USE)]
    assert trainer.file.read().version.name == "v"
    trainer.answer(0)
    trainer.answer(1)
    (answer,) = trainer.answers()
    assert (answer.refused, answer.version) == ("", "v")


def test_one_worker_that_cannot_keeps_all_at_the_old_version(trainer: Trainer) -> None:
    trainer.update(version="v")
    trainer.take()
    trainer.answer(1, "its shape is wrong")
    assert trainer.take() == [(0, WeightsTask.ABANDON), (1, WeightsTask.ABANDON)]
    assert trainer.answer(0) == ""
    (answer,) = trainer.answers()
    assert (answer.refused, answer.version) == ("its shape is wrong", "default")
    assert trainer.file.read().version.number == 0
    trainer.update(version="w")
    trainer.answer_all()
    assert trainer.answers()[0].version == "w"


def test_workers_that_read_different_files_change_nothing(trainer: Trainer) -> None:
    trainer.update()
    trainer.take()
    trainer.answer(0, stamp="one")
    trainer.answer(1, stamp="another")
    trainer.take()
    assert "different files" in trainer.answers()[0].refused


def test_a_worker_that_dies_of_new_weights_fails_them(trainer: Trainer) -> None:
    trainer.update()
    trainer.take()
    trainer.yard.scheduler.lose_worker(0)
    assert "died" in trainer.answers()[0].refused
    assert trainer.file.read().version.number == 0


def test_a_worker_that_comes_with_another_version_is_led_before_it_gets_work(trainer: Trainer) -> None:
    trainer.update()
    trainer.answer_all()
    trainer.yard.scheduler.lose_worker(0)
    trainer.yard.scheduler.lose_worker(1)
    trainer.yard.start_worker(0, epoch=1)
    trainer.yard.submit(1, PROMPT, 4, [])
    assert (trainer.yard.scheduler.next_steps(), trainer.take()) == ([], [(0, WeightsTask.PREPARE)])
    trainer.answer(0)
    assert trainer.take() == [(0, WeightsTask.USE)]
    trainer.answer(0)
    trainer.yard.drain()
    assert len(trainer.yard.tokens[1]) == 4
    # One that cannot be led must go.
    trainer.yard.start_worker(1, epoch=1)
    trainer.take()
    assert "its file is gone" in trainer.answer(1, "its file is gone")


@pytest.mark.parametrize("mode", [RunningMode.WAIT, RunningMode.KEEP, RunningMode.RETRACT, RunningMode.ABORT])
def test_requests_meet_a_change_as_asked(tmp_path: Path, mode: int) -> None:
    trainer = Trainer(tmp_path, workers=1)
    yard = trainer.yard
    yard.submit(1, PROMPT, 20, [])
    while len(yard.tokens[1]) < 3:
        yard.turn()
    trainer.update(version="v", running=mode)
    trainer.take()
    yard.submit(2, PROMPT, 4, [])
    trainer.answer(0)
    before = len(yard.tokens[1])
    while not trainer.take():
        assert yard.turn()
    if mode == RunningMode.WAIT:
        assert (len(yard.tokens[1]), len(yard.tokens[2])) == (20, 0)
    else:
        assert before <= len(yard.tokens[1]) <= before + 2
    assert yard.scheduler.next_steps() == []
    trainer.answer(0)
    yard.drain()
    ended = mode == RunningMode.ABORT
    assert (len(yard.tokens[1]) == 20, len(yard.tokens[2])) == (not ended, 0 if ended else 4)
    # No request has use of blocks of the old version, and a later one has of those of the new one.
    for handle in (3, 4):
        yard.submit(handle, PROMPT, 4, [])
        yard.drain()
    assert (2 not in yard.cached, 3 in yard.cached, yard.cached[4] > 0) == (True, not ended, True)


def test_blocks_of_two_versions_are_shared_with_nobody_else(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, workers=1)
    yard = trainer.yard
    yard.submit(1, PROMPT, 20, [])
    while len(yard.tokens[1]) < 3:
        yard.turn()
    trainer.update(running=RunningMode.KEEP)
    trainer.take()
    trainer.answer(0)
    while not trainer.take():
        yard.turn()
    trainer.answer(0)
    yard.drain()
    yard.submit(2, [*PROMPT, *yard.tokens[1][:16]], 4, [])
    yard.drain()
    assert (len(yard.tokens[1]), len(yard.tokens[2]), 2 in yard.cached) == (20, 4, False)


def test_released_memory_holds_requests(trainer: Trainer) -> None:
    trainer.yard.submit(1, PROMPT, 4, [])
    trainer.yard.turn()
    trainer.order(WeightsAction.RELEASE, tags=[KV_CACHE, WEIGHTS])
    while not trainer.take():
        trainer.yard.turn()
    assert trainer.file.read().absent == [WEIGHTS, KV_CACHE]
    trainer.answer(0)
    trainer.answer(1)
    assert trainer.answers()[0].requests == 1
    assert not trainer.yard.turn()
    assert "released" in trainer.yard.scheduler.status().reason
    # A worker that comes meanwhile gives its memory back, too.
    trainer.yard.scheduler.lose_worker(1)
    trainer.yard.start_worker(1, epoch=1)
    assert trainer.take() == [(1, WeightsTask.RELEASE)]
    trainer.answer(1)
    for tag in (WEIGHTS, KV_CACHE):
        trainer.order(WeightsAction.RESUME, tags=[tag])
        trainer.answer_all()
    trainer.yard.drain()
    assert len(trainer.yard.tokens[1]) == 4


def test_files_that_were_sent_stay_while_they_are_needed(trainer: Trainer, tmp_path: Path) -> None:
    uploads = tmp_path / "uploads"
    uploads.mkdir()

    def sent(name: str, *tensors: str) -> str:
        header = str({tensor: {} for tensor in tensors}).replace("'", '"').encode()
        path = uploads / name
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        return str(path)

    def there() -> set[str]:
        return {path.name for path in uploads.iterdir()}

    trainer.order(WeightsAction.UPDATE, overlays=[sent("one", "a", "b")])
    trainer.answer_all()
    trainer.order(WeightsAction.UPDATE, overlays=[sent("two", "a")])
    trainer.answer_all()
    assert there() == {"one", "two"}
    trainer.order(WeightsAction.UPDATE, overlays=[sent("held", "b")], hold=True)
    assert [one.refused for one in trainer.answers()] == ["", "", ""]
    trainer.order(WeightsAction.UPDATE, overlays=[sent("three", "c")])
    trainer.answer_all()
    assert there() == {"two", "held", "three"}
    trainer.order(WeightsAction.UPDATE, overlays=[sent("wrong", "x")])
    trainer.take()
    trainer.answer(0, "x is no weight")
    assert there() == {"two", "held", "three"}
    trainer.take()
    trainer.answer(1)
    trainer.update()
    trainer.answer_all()
    assert (there(), trainer.file.read().version.source) == (set(), "/new")


def test_a_group_ranks_workers_and_the_first_keeps_what_is_sent(trainer: Trainer) -> None:
    trainer.order(WeightsAction.JOIN, group=GroupSpec("g", "host", 1, 1, 3))
    trainer.take()
    assert [command.group.rank for _, command in trainer.sent if command.group] == [1, 2]
    trainer.answer(0)
    trainer.answer(1)
    trainer.order(WeightsAction.RECEIVE, group=GroupSpec("g"), tensors=[TensorSpec("a", "float32", [1])], version="v")
    trainer.take()
    assert [bool(command.path) for _, command in trainer.sent] == [True, False]
    trainer.answer_all()
    assert [answer.version for answer in trainer.answers()] == ["default", "v"]


def test_a_new_scheduler_serves_the_same_version(trainer: Trainer) -> None:
    trainer.update(version="v")
    trainer.answer_all()
    again = Scheduler(LIMITS, 2, trainer.yard.clock, weights_file=trainer.file)
    assert (again.status().weights.name, again.status().weights.number) == ("v", 1)


def test_without_workers_an_order_is_refused_for_now(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, workers=0)
    trainer.update()
    assert trainer.answers()[0].unavailable


def test_the_weights_of_a_group_of_ranks_stay(trainer: Trainer) -> None:
    worker = trainer.yard.workers[1].hello
    assert trainer.yard.scheduler.worker_hello(replace(worker, epoch=worker.epoch + 1, ranks=2))
    for action in (WeightsAction.UPDATE, WeightsAction.RELEASE, WeightsAction.READ):
        trainer.order(action, source="/new", tags=[KV_CACHE])
        (answer,) = trainer.answers()
        assert (
            "a group of ranks (tensor_parallel 2) are not changed while it runs: restart the server" in answer.refused
        )
    trainer.order(WeightsAction.RENAME, version="named")
    (answer,) = trainer.answers()
    assert (answer.refused, answer.version) == ("", "named")
    assert trainer.take() == []
