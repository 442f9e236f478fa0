"""How ranks of several hosts meet, over tcp on this one: who is let in, who is refused, and who is missed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from model_worker.tensor_parallel.beats import NetworkMates
from model_worker.tensor_parallel.exchange import GroupLost
from model_worker.tensor_parallel.network import NetworkFollower, NetworkLeader, NetworkPlace
from model_worker.tensor_parallel.steps import Standing
from shared.curve import make_peer_keys, make_server_keys
from tests.system.server import free_port

SECONDS = 20.0
STORE_PORT = 1234


@pytest.fixture
def place(tmp_path: Path) -> NetworkPlace:
    make_server_keys(tmp_path / "keys")
    keys = make_peer_keys(tmp_path / "keys", "group")
    return NetworkPlace(f"127.0.0.1:{free_port()}", 0, 2, keys, {"model": "a", "dtype": "float32"})


@contextmanager
def coming(*places: NetworkPlace, seconds: float = SECONDS) -> Iterator[list[Future[NetworkFollower]]]:
    """Other ranks that come meanwhile."""
    with ThreadPoolExecutor(len(places)) as threads:
        yield [threads.submit(NetworkFollower, place, seconds) for place in places]


@contextmanager
def met(place: NetworkPlace) -> Iterator[tuple[NetworkLeader, NetworkFollower]]:
    leader = NetworkLeader(place)
    with coming(replace(place, rank=1)) as [other]:
        leader.meet(STORE_PORT, SECONDS)
        follower = other.result()
    try:
        yield leader, follower
    finally:
        follower.close()
        leader.close()


def test_messages_come_whole_and_in_order(place: NetworkPlace) -> None:
    with met(place) as (leader, follower):
        assert follower.store_port == STORE_PORT
        assert follower.names == leader.names
        assert follower.receive(0.0) is None
        messages = [b"", b"one", bytes(3_000_000)]
        for message in messages:
            leader.send(message)
        assert [follower.receive(SECONDS) for _ in messages] == messages


def test_a_rank_with_other_settings_is_refused_with_both_values(
    place: NetworkPlace, caplog: pytest.LogCaptureFixture
) -> None:
    leader = NetworkLeader(place)
    wrong = replace(place, rank=1, terms={"model": "a", "dtype": "bfloat16"})
    with coming(wrong, replace(place, rank=7)) as futures:
        with pytest.raises(GroupLost, match=r"rank 1 of 2 has not come to 127.0.0.1:\d+ in 3 s"):
            leader.meet(STORE_PORT, 3.0)
        said = [str(future.exception()) for future in futures]
    leader.close()
    both = "rank 1 has dtype 'bfloat16', and rank 0 has 'float32': start both alike"
    assert said == [both, "rank 7 is none of the 2 ranks of this group"]
    assert both in caplog.text


def test_one_with_other_keys_is_not_heard(place: NetworkPlace, tmp_path: Path) -> None:
    """Of the same server's, even: another peer may not be a rank."""
    keys = make_peer_keys(tmp_path / "keys", "stranger")
    leader = NetworkLeader(place)
    with coming(replace(place, rank=1, keys=keys), seconds=2.0) as [stranger]:
        with pytest.raises(GroupLost, match="rank 1 of 2 has not come"):
            leader.meet(STORE_PORT, 2.0)
        assert "rank 0 has not come to" in str(stranger.exception())
    leader.close()


def test_a_rendezvous_that_is_elsewhere_is_refused_by_rank_0(place: NetworkPlace) -> None:
    # An address of documentation (RFC 5737), which no host has.
    with pytest.raises(ValueError, match=r"rendezvous 192\.0\.2\.1:5700 cannot be bound by rank 0"):
        NetworkLeader(replace(place, rendezvous="192.0.2.1:5700"))
    with pytest.raises(GroupLost, match=r"the host of the rendezvous is\.invalid:5700 is not known"):
        NetworkLeader(replace(place, rendezvous="is.invalid:5700"), 0.1)


def test_ranks_hear_each_other_and_name_the_one_that_is_silent(place: NetworkPlace) -> None:
    with met(place) as (leader, follower):
        first = NetworkMates(leader.beats, 0, leader.names)
        second = NetworkMates(follower.beats, 1, follower.names)
        own, others = Standing(3, 2, 40, 7), Standing(3, 1, 39, 6)

        def hear() -> bool:
            assert second.swap(others, 0.0) == []
            return first.swap(own, 0.0) == [own, others]

        deadline = time.monotonic() + SECONDS
        while not hear():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first.silence = second.silence = 4.0
        first.swap(own, 3.0)
        assert first.lost() == ""
        assert f"{leader.names[1]} is not heard for 4 s" in _silent_for(first, own, 3.0)
        assert f"{leader.names[0]} is not heard for 4 s" in _silent_for(second, others, 3.0)
        assert not first.blamed, "what is computed does not cut a link"
        assert not second.blamed


@pytest.mark.parametrize("blamed", [False, True])
def test_a_rank_that_ends_says_why_and_whether_a_request_may_be_the_reason(place: NetworkPlace, blamed: bool) -> None:
    with met(place) as (leader, follower):
        first = NetworkMates(leader.beats, 0, leader.names)
        second = NetworkMates(follower.beats, 1, follower.names)
        _beat_until(lambda: first.swap(Standing(), 0.0)[1].begun == 1, lambda: second.swap(Standing(1), 0.0))
        assert first.lost() == second.lost() == ""
        second.parting = "a reason", blamed
        second.swap(Standing(1), 0.0)
        _beat_until(lambda: first.swap(Standing(), 0.0) and first.lost())
        assert first.lost() == f"{leader.names[1]} ends: a reason"
        assert first.blamed == blamed
        first.parting = first.lost(), blamed
        first.swap(Standing(), 0.0)
        _beat_until(lambda: second.swap(Standing(1), 0.0) or second.lost())
        assert second.lost() == f"{leader.names[0]} ends: {leader.names[1]} ends: a reason"


def _beat_until(come: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + SECONDS
    while not come():
        meanwhile()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _silent_for(mates: NetworkMates, own: Standing, seconds: float) -> str:
    """What is said when the others have not been heard for so long; what they had sent may still come."""
    _beat_until(mates.lost, lambda: mates.swap(own, seconds))
    return mates.lost()
