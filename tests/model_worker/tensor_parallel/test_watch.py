"""Who is named when a group stands still: on GPUs, whose events are fakes here, and over a network."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.tensor_parallel import watch as watching
from model_worker.tensor_parallel.passes import GroupBackend, follow, packed
from model_worker.tensor_parallel.steps import Standing, Steps, are_idle, awaited
from model_worker.tensor_parallel.watch import Watch, end_process

BLOCK_SIZE = 4


class Event:
    """An event of a GPU that has come where the GPU has come to it."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self._number = self._device.launched = self._device.launched + 1

    def query(self) -> bool:
        return self._number <= self._device.done


class Device:
    """A GPU that has launched so many steps, and computed fewer."""

    def __init__(self) -> None:
        self.launched = 0
        self.done = 0

    def event(self) -> Event:
        return Event(self)


class Part:
    """A rank's part, which computes nothing."""

    device = torch.device("cpu")
    vocab_size = 9

    def logits(self, batch: ForwardBatch) -> Tensor:
        return torch.empty(0)

    hidden = logits


class Rank:
    """A rank on a GPU, with its counter of steps."""

    def __init__(self) -> None:
        self.gpu = Device()
        self.steps = Steps(self.gpu.event)
        self.sent: list[bytes] = []

    def send(self, message: bytes | bytearray) -> None:
        self.sent.append(bytes(message))


class Mates:
    """Ranks of one host, as they stand."""

    parting = "", False
    blamed = False

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def swap(self, own: Standing, waited: float) -> Sequence[Standing]:
        return [rank.steps.standing() for rank in self._ranks]

    def lost(self) -> str:
        return ""

    def name(self, rank: int) -> str:
        return f"rank {rank} (pid {4711 + rank})"


def batch() -> ForwardBatch:
    one = np.ones(1, np.int32)
    return ForwardBatch.build(np.zeros(1, np.int64), one, one, np.zeros((1, 1), np.int32), BLOCK_SIZE, one - 1)


def group(patience: float = 9.0) -> tuple[list[Rank], GroupBackend, Watch]:
    ranks = [Rank(), Rank(), Rank()]
    part: Any = Part()
    watch = Watch(ranks[0].steps, Mates(ranks), lambda: None)
    watch.patience = patience
    return ranks, GroupBackend(part, BLOCK_SIZE, ranks[0], None, ranks[0].steps), watch


def compute(ranks: Sequence[Rank], first: GroupBackend, messages: dict[int, int]) -> None:
    """Rank 0 launches a step, and the others as many of those that were sent as `messages` has for them."""
    first.logits(batch())
    part: Any = Part()
    for rank, count in messages.items():
        waiting = [packed(batch())] * count + [b""]
        follow(part, partial(waiting.pop, 0), None, ranks[rank].steps)


def test_a_rank_whose_host_has_not_launched_a_step_is_named() -> None:
    ranks, first, watch = group()
    compute(ranks, first, {1: 1, 2: 1})
    for rank in ranks:
        rank.gpu.done = 1
    assert watch.look(100.0) == ""
    assert watch.look(100.0) == "", "nothing is open, so nobody is awaited"
    compute(ranks, first, {1: 1})
    assert watch.look(1.0) == ""
    assert watch.look(8.0) == ""
    assert watch.look(2.0) == "rank 2 (pid 4713) hangs: it has not begun step 2 in 10 s"
    assert watch.blamed, "what it should compute may be the reason"


def test_a_gpu_that_does_not_end_a_step_is_named() -> None:
    ranks, first, watch = group()
    compute(ranks, first, {1: 1, 2: 1})
    ranks[0].gpu.done = ranks[2].gpu.done = 1
    watch.look(0.0)
    assert watch.look(10.0) == "rank 1 (pid 4712) hangs: it has begun step 1 and not ended it in 10 s"


def test_steps_that_go_on_start_the_time_anew() -> None:
    ranks, first, watch = group()
    for done in range(5):
        compute(ranks, first, {1: 1, 2: 1})
        ranks[0].gpu.done = done
        assert watch.look(8.0) == ""


def test_nobody_is_named_while_the_group_starts() -> None:
    ranks, first, watch = group()
    watch.patience = None
    compute(ranks, first, {1: 1})
    watch.look(0.0)
    assert watch.look(100.0) == ""


def test_a_step_that_could_not_be_sent_is_awaited_from_nobody() -> None:
    ranks, first, watch = group()
    compute(ranks, first, {1: 1, 2: 1})
    for rank in ranks:
        rank.gpu.done = 1

    def fail(_: bytes) -> None:
        raise ValueError("a batch that cannot be sent")

    ranks[0].send = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="cannot be sent"):
        first.logits(batch())
    watch.look(100.0)
    assert watch.look(100.0) == ""
    assert ranks[0].steps.standing() == Standing(1, 1)


@pytest.mark.parametrize(
    ("standings", "ranks", "undone"),
    [
        ([Standing(5, 4), Standing(4, 4), Standing(5, 4)], [1], "has not begun step 5"),
        ([Standing(5, 4, 90), Standing(5, 4, 88), Standing(5, 4, 90)], [1], "has not come to exchange 90, in step 5"),
        ([Standing(5, 4, 90), Standing(5, 5, 90)], [0], "has begun step 5 and not ended it"),
    ],
)
def test_who_is_awaited(standings: list[Standing], ranks: list[int], undone: str) -> None:
    assert awaited(standings) == (ranks, undone)
    assert not are_idle(standings)


class Told:
    """A rank that is told how all stand, and which is lost."""

    parting = "", False
    blamed = False

    def __init__(self) -> None:
        self.standings: list[Standing] = []
        self.story = ""
        self.told: list[tuple[str, bool]] = []

    def swap(self, own: Standing, waited: float) -> Sequence[Standing]:
        self.told.append(self.parting)
        return [own, *self.standings]

    def lost(self) -> str:
        return self.story

    def name(self, rank: int) -> str:
        return f"rank {rank}"


def test_a_rank_that_sums_something_else_is_named() -> None:
    digests = iter([11, 12])
    steps = Steps(None, lambda: (40, next(digests, 12)))
    told = Told()
    watch = Watch(steps, told, lambda: None)
    with steps.step():
        pass
    told.standings = [Standing(1, 1, 40, 11)]
    assert watch.look(0.25) == ""
    with steps.step():
        pass
    assert watch.look(0.25) == "", "rank 1 is behind, and right so far"
    told.standings = [Standing(2, 2, 40, 13)]
    assert watch.look(0.25) == "rank 1 diverges: by the end of step 2 sums are 0000000c and 0000000d"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(watching, "_SENDING_SECONDS", 0.0)


@pytest.mark.usefixtures("quick")
def test_the_thread_ends_a_process_whose_main_thread_waits_with_the_first_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_LAST_SECONDS", 0.001)
    told = Told()
    told.standings = [Standing()]
    done: list[str] = []
    watch = Watch(Steps(None), told, lambda: done.append("ended"), lambda: done.append("woken"))
    watch.start()
    told.story = "rank 1 is not heard"
    watch.join(60.0)
    assert done == ["woken", "ended"]
    assert (watch.story, watch.blamed) == ("rank 1 is not heard", False)
    assert told.told[-1] == ("rank 1 is not heard", False)


@pytest.mark.usefixtures("quick")
def test_the_others_are_told_of_a_loss_when_the_main_thread_has_ended_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_LAST_SECONDS", 60.0)
    told = Told()
    done: list[str] = []
    woken = threading.Event()
    watch = Watch(Steps(None), told, lambda: done.append("ended"), woken.set)
    watch.start()
    told.story = "rank 1 ends: it was asked to end"
    assert woken.wait(60.0)
    assert told.parting == ("", False)
    watch.finish("GroupLost")
    assert not watch.is_alive()
    assert told.told[-1] == ("rank 1 ends: it was asked to end", False)
    assert not done


@pytest.mark.usefixtures("quick")
def test_a_rank_that_was_asked_to_end_says_so_and_goes_on() -> None:
    told = Told()
    watch = Watch(Steps(None), told, lambda: None)
    watch.leave()
    watch.start()
    while not told.told:
        assert watch.is_alive()
    assert told.told[0] == ("it was asked to end", False)
    assert watch.is_alive()
    watch.finish("ValueError: no such block", blamed=True)
    assert told.told[-1] == ("ValueError: no such block", True)
    assert not watch.story


def test_a_process_is_ended_without_its_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    end_process()
    assert ended == [1]
