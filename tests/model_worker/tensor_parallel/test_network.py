"""How ranks of several hosts meet, over tcp on this one: who is let in, who is refused, and who is missed."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from model_worker.tensor_parallel import network
from model_worker.tensor_parallel.beats import NetworkMates
from model_worker.tensor_parallel.exchange import NotMet
from model_worker.tensor_parallel.network import NetworkFollower, NetworkLeader, NetworkPlace
from model_worker.tensor_parallel.steps import Standing
from shared.curve import make_peer_keys, make_server_keys
from tests.system.server import free_port

SECONDS = 60.0
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
def meeting(leader: NetworkLeader) -> Iterator[None]:
    """Rank 0 waits for the others meanwhile, who all come."""
    with ThreadPoolExecutor(1) as thread:
        met = thread.submit(leader.meet, STORE_PORT, SECONDS)
        yield
        met.result()


def _wait_for(leader: NetworkLeader, missing: str) -> None:
    """Wait until these ranks alone are missing."""
    deadline = time.monotonic() + SECONDS
    while True:
        with pytest.raises(NotMet, match="has not come") as lost:
            leader.meet(STORE_PORT, 0.1)
        if str(lost.value).startswith(f"rank {missing} of "):
            return
        assert time.monotonic() < deadline


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


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_messages_come_whole_and_in_order(place: NetworkPlace, address: str) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    with met(replace(place, rendezvous=f"{address}:{free_port()}")) as (leader, follower):
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
    with meeting(leader), coming(wrong, replace(place, rank=7)) as futures:
        said = [str(future.exception()) for future in futures]
        # Where the others have its version and settings later, it is let in.
        NetworkFollower(replace(place, rank=1), SECONDS).close()
    leader.close()
    both = "rank 1 has dtype 'bfloat16', and rank 0 has 'float32': start both alike"
    refused = [both, "rank 7 is none of the 2 ranks of this group"]
    assert said == [f"rank 0 refuses this rank: {why}" for why in refused]
    assert both in caplog.text


def test_who_does_not_come_is_named(place: NetworkPlace) -> None:
    leader = NetworkLeader(place)
    with pytest.raises(NotMet, match=r"rank 1 of 2 has not come to 127.0.0.1:\d+ in 0 s"):
        leader.meet(STORE_PORT, 0.1)
    leader.close()
    with pytest.raises(NotMet, match="rank 0 has not come to"):
        NetworkFollower(replace(place, rank=1), 0.1)


def test_one_with_other_keys_is_not_heard(place: NetworkPlace, tmp_path: Path) -> None:
    """Of the same server's, even: another peer may not be a rank. One with the keys comes later, and is heard."""
    keys = make_peer_keys(tmp_path / "keys", "stranger")
    place = replace(place, ranks=3)
    leader = NetworkLeader(place)
    with coming(replace(place, rank=2, keys=keys), replace(place, rank=1), seconds=5.0) as futures:
        _wait_for(leader, missing="2")
        with pytest.raises(NotMet, match="rank 2 of 3 has not come"):
            leader.meet(STORE_PORT, 1.0)
        assert all("rank 0 has not come to" in str(future.exception()) for future in futures)
    leader.close()


def test_two_hosts_with_one_number_are_told_so(place: NetworkPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = (f"host-{number}" for number in count())
    monkeypatch.setattr(socket, "gethostname", lambda: next(hosts))
    place = replace(place, ranks=3)
    leader = NetworkLeader(place)
    with meeting(leader), coming(replace(place, rank=1), replace(place, rank=1)) as futures:
        refused = next(as_completed(futures))
        assert re.search(
            r"two say that they are rank 1: pid \d+ on host-., and pid \d+ on host-.; each host has another --node",
            str(refused.exception()),
        )
        NetworkFollower(replace(place, rank=2), SECONDS).close()
        [met] = [future for future in futures if future is not refused]
        met.result().close()
    leader.close()


def test_a_rank_that_has_come_and_ended_is_named(place: NetworkPlace) -> None:
    leader = NetworkLeader(place)
    leader._greet(b"gone", {"rank": 1, "pid": 7, "host": "other", "digest": place.digest()})
    with pytest.raises(NotMet, match=r"rank 1 \(pid 7 on other\) has come, and ended before all were there"):
        leader.meet(STORE_PORT, SECONDS)
    leader.close()


def test_the_rendezvous_is_looked_up_until_it_leads_to_rank_0(
    place: NetworkPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, port = place.address()
    # An address of documentation (RFC 5737), which no host has, and one of this host at which nobody listens.
    answers = iter([("192.0.2.1", port), (right, port), ("127.0.0.2", port)])
    monkeypatch.setattr(NetworkPlace, "address", lambda _: next(answers, (right, port)))
    monkeypatch.setattr(network, "_RETRY_SECONDS", 0.1)
    leader = NetworkLeader(place, SECONDS)
    with meeting(leader):
        NetworkFollower(replace(place, rank=1), SECONDS).close()
    leader.close()


def test_a_rendezvous_that_is_elsewhere_is_refused_by_rank_0(place: NetworkPlace) -> None:
    with pytest.raises(ValueError, match=r"rendezvous 192\.0\.2\.1:5700 cannot be bound by rank 0"):
        NetworkLeader(replace(place, rendezvous="192.0.2.1:5700"), 0.0)
    with pytest.raises(NotMet, match=r"the host of the rendezvous is\.invalid:5700 is not known"):
        NetworkLeader(replace(place, rendezvous="is.invalid:5700"), 0.0)


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
