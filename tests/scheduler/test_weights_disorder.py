"""Orders about weights that meet workers of other versions, errors of ours, and files that no order needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from interfaces import GroupSpec, TensorSpec, WeightsAction, WeightsReport, WeightsTask
from scheduler.core import Scheduler
from tests.scheduler.simulated_worker import SimulatedWorker
from tests.scheduler.test_core import LIMITS
from tests.scheduler.test_weights import PROMPT, Trainer


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def join_with(trainer: Trainer, index: int, epoch: int, number: int) -> None:
    """Let a worker join that computes with another version."""
    yard = trainer.yard
    yard.workers[index] = SimulatedWorker(index, epoch, **yard.shape)
    yard.in_flight[index].clear()
    assert yard.scheduler.worker_hello(replace(yard.workers[index].hello, weights=number))


def test_an_order_waits_until_every_worker_is_led(trainer: Trainer) -> None:
    """A worker that is led prepares one version after the other: it must not use a later one for an earlier."""
    trainer.update(version="one")
    trainer.take()
    trainer.answer(0)
    trainer.answer(1)
    trainer.take()
    trainer.yard.scheduler.lose_worker(1)
    trainer.sent = [one for one in trainer.sent if one[0] != 1]
    trainer.yard.start_worker(1, epoch=1)
    trainer.update(version="two")
    assert trainer.take() == [(1, WeightsTask.PREPARE)]
    trainer.answer(0)
    trainer.answer(1)
    trainer.take()
    (use,) = [command for owner, command in trainer.sent if owner == 1]
    assert (use.task, use.version is not None and use.version.name) == (WeightsTask.USE, "one")
    trainer.answer(1)
    assert trainer.take() == [(0, WeightsTask.PREPARE), (1, WeightsTask.PREPARE)]
    trainer.answer_all()
    assert [answer.version for answer in trainer.answers()] == ["one", "two"]
    assert [worker.weights.number for worker in trainer.yard.scheduler.workers.values()] == [2, 2]


def test_tensors_that_come_while_a_worker_is_led_wait_for_it(trainer: Trainer) -> None:
    trainer.order(WeightsAction.RECEIVE, group=GroupSpec("g"), tensors=[TensorSpec("a", "float32", [1])], version="v")
    trainer.take()
    join_with(trainer, 2, 0, 7)
    assert trainer.take() == [(2, WeightsTask.PREPARE)]
    trainer.answer(0)
    trainer.answer(1)
    assert trainer.take() == []
    trainer.answer_all()
    assert [answer.version for answer in trainer.answers()] == ["v"]
    assert {worker.weights.number for worker in trainer.yard.scheduler.workers.values()} == {1}


def test_a_worker_that_cannot_use_what_it_prepared_must_go_and_the_others_serve_it(
    trainer: Trainer, tmp_path: Path
) -> None:
    (tmp_path / "uploads").mkdir()
    sent = tmp_path / "uploads" / "sent"
    sent.write_bytes(b"")
    trainer.order(WeightsAction.UPDATE, overlays=[str(sent)], version="v")
    trainer.take()
    trainer.answer(0)
    trainer.answer(1)
    trainer.take()
    assert "no version was prepared" in trainer.answer(1, "no version was prepared")
    trainer.yard.scheduler.lose_worker(1, blamed=False)
    trainer.answer(0)
    assert [(answer.refused, answer.version) for answer in trainer.answers()] == [("", "v")]
    assert sent.exists()
    trainer.yard.submit(1, PROMPT, 4, [])
    trainer.yard.drain()
    assert len(trainer.yard.tokens[1]) == 4


def test_a_failed_order_leaves_a_worker_alone_that_came_meanwhile(trainer: Trainer) -> None:
    trainer.update()
    trainer.take()
    trainer.yard.scheduler.lose_worker(0, blamed=False)
    trainer.sent = [one for one in trainer.sent if one[0] != 0]
    join_with(trainer, 0, 1, 7)
    trainer.take()
    trainer.answer(1, "its shape is wrong")
    assert trainer.take() == [(1, WeightsTask.ABANDON)]


@pytest.mark.parametrize("reason", ["preempted", "recovered"])
def test_requests_that_lost_their_rows_end_with_the_old_weights_too(tmp_path: Path, reason: str) -> None:
    trainer = Trainer(tmp_path, workers=0)
    yard = trainer.yard
    yard.shape["num_blocks"] = 10
    yard.start_worker(0, epoch=0)
    # Each of them needs eight of the ten blocks at its end.
    for handle in (1, 2):
        yard.submit(handle, [handle] * 8, 20, [])
    while not (yard.tokens[1] and yard.tokens[2]):
        assert yard.turn()
    trainer.update()
    trainer.take()
    yard.submit(3, PROMPT, 4, [])
    trainer.answer(0)
    if reason == "recovered":
        yard.scheduler.lose_worker(0)
        yard.start_worker(0, epoch=1)
    while not trainer.take():
        assert yard.turn()
    assert (yard.scheduler.counters["preemptions"] > 0, len(yard.tokens[1]), len(yard.tokens[2])) == (True, 20, 20)
    assert yard.tokens[3] == []
    trainer.answer_all()
    yard.drain()
    assert len(yard.tokens[3]) == 4


def test_an_error_of_ours_refuses_one_order(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> None:
        raise KeyError(path)

    with monkeypatch.context() as patch:
        patch.setattr("scheduler.weights_registry.overlay_of", fails)
        trainer.order(WeightsAction.UPDATE, overlays=["x"])
    (answer,) = trainer.answers()
    assert "KeyError" in answer.refused
    trainer.update(version="v")
    trainer.answer_all()
    assert trainer.answers()[0].version == "v"


def test_a_file_with_a_header_that_nests_too_deeply_is_left_to_the_workers(trainer: Trainer, tmp_path: Path) -> None:
    header = b'{"a":' + b"[" * 100_000
    sent = tmp_path / "deep"
    sent.write_bytes(len(header).to_bytes(8, "little") + header)
    trainer.order(WeightsAction.UPDATE, overlays=[str(sent)])
    assert trainer.take() == [(0, WeightsTask.PREPARE), (1, WeightsTask.PREPARE)]
    trainer.answer(0, "it is no safetensors file")
    assert trainer.answers()[0].refused == "it is no safetensors file"


def test_tensors_that_no_order_waits_for_are_removed(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = tmp_path / "uploads"
    uploads.mkdir()

    def receive(hold: bool = False) -> Path:
        tensors = [TensorSpec("a", "float32", [1])]
        trainer.order(WeightsAction.RECEIVE, group=GroupSpec("g"), tensors=tensors, hold=hold)
        trainer.take()
        return Path(next(command.path for owner, command in trainer.sent if owner == 0))

    # A worker still receives when another one has failed the order.
    path = receive()
    trainer.answer(1, "g is no group")
    path.write_bytes(b"late")
    trainer.answer(0)
    assert not path.exists()
    # What is held takes at most half of the room.
    for free in (100, 3):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free}))
        path = receive(hold=True)
        path.write_bytes((2).to_bytes(8, "little") + b"{}")
        trainer.answer(0)
        trainer.answer(1)
        assert path.exists() == (free == 100)
    assert ["would take 20 bytes" in answer.refused for answer in trainer.answers()] == [False, False, True]
    # Another scheduler removes what nothing serves, also what a worker writes for the one before.
    trainer.update()
    trainer.answer_all()
    sent = uploads / "sent"
    sent.write_bytes(b"")
    trainer.order(WeightsAction.UPDATE, overlays=[str(sent)])
    trainer.answer_all()
    (uploads / "stray").write_bytes(b"")
    trainer.yard.scheduler = Scheduler(LIMITS, 2, trainer.yard.clock, weights_file=trainer.file)
    assert list(uploads.iterdir()) == [sent]
    join_with(trainer, 0, 0, 2)
    (uploads / "received-1-9.safetensors").write_bytes(b"")
    trainer.weights.heard(WeightsReport(1, 0, 0, 99))
    assert list(uploads.iterdir()) == [sent]
