"""How ranks meet, and how each sees that another one has ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.tensor_parallel.links import Follower, Leader, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "group.sock", 0, 2, 3, {"model": "a", "dtype": "float32"})


@contextmanager
def coming(*places: Place, seconds: float = 10.0) -> Iterator[SimpleQueue[Follower | GroupLost]]:
    """Other ranks that come meanwhile: what becomes of each."""
    ends: SimpleQueue[Follower | GroupLost] = SimpleQueue()

    def come(place: Place) -> None:
        try:
            ends.put(Follower(place, seconds))
        except GroupLost as error:
            ends.put(error)

    threads = [threading.Thread(target=come, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    yield ends
    for thread in threads:
        thread.join()


def met(place: Place) -> tuple[Leader, Follower]:
    with coming(replace(place, rank=1)) as ends:
        leader = Leader(place, 1 << 10, 10.0)
        other = ends.get()
    assert isinstance(other, Follower)
    return leader, other


def test_messages_come_whole_and_in_order(place: Place) -> None:
    leader, other = met(place)
    assert other.receive(0.0) is None
    messages = [b"", b"one", bytes(3_000_000)]

    def send() -> None:
        for message in messages:
            leader.send(message)

    sender = threading.Thread(target=send)
    sender.start()
    assert [other.receive(5.0) for _ in messages] == messages
    sender.join()


def test_all_share_the_memory_of_the_exchange(place: Place) -> None:
    leader, other = met(place)
    thread = threading.Thread(target=other.exchange.sum, args=(torch.ones(2),))
    thread.start()
    assert leader.exchange.sum(torch.ones(2)).tolist() == [2.0, 2.0]
    thread.join()


def test_each_side_sees_that_the_other_has_ended(place: Place) -> None:
    leader, other = met(place)
    leader.check()
    other.check()
    assert not leader.trouble()
    leader.close()
    for call in (other.check, lambda: other.receive(1.0)):
        with pytest.raises(GroupLost, match=rf"rank 0 \(pid {os.getpid()}\) of the group has ended"):
            call()
    leader, other = met(place)
    other.close()
    assert leader.trouble() == f"rank 1 (pid {os.getpid()}) of the group has ended"
    with pytest.raises(GroupLost, match="rank 1"):
        leader.check()


def test_a_rank_that_does_not_come_is_named(place: Place) -> None:
    three = replace(place, ranks=4)
    with coming(replace(three, rank=2)) as ends:
        with pytest.raises(GroupLost, match="rank 1, 3 of 4 has not come in time"):
            Leader(three, 1 << 10, 3.0)
        assert isinstance(ends.get(), GroupLost)
    with pytest.raises(GroupLost, match="rank 0 of the group has not come in time"):
        Follower(replace(place, rank=1), 0.2)


def test_a_rank_with_another_setting_is_refused_with_both_values(place: Place) -> None:
    with coming(replace(place, rank=1, terms={"model": "a", "dtype": "bfloat16"})) as ends:
        with pytest.raises(GroupLost, match="rank 1 has dtype 'bfloat16', and rank 0 has 'float32'"):
            Leader(place, 1 << 10, 10.0)
        assert isinstance(ends.get(), GroupLost)


def test_a_rank_of_an_earlier_start_is_sent_away(place: Place) -> None:
    with coming(replace(place, rank=1, epoch=2), seconds=1.0) as ends:
        with coming(replace(place, rank=1)) as right:
            leader = Leader(place, 1 << 10, 10.0)
            assert isinstance(right.get(), Follower)
        assert isinstance(ends.get(), GroupLost)
        leader.close()
