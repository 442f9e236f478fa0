"""Sockets between processes: single frames, names that are taken over, and no waiting for a dead peer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from interfaces.messages import Cancel, Goodbye, Inquiry
from interfaces.wire.codec import decode, encode
from shared.sockets import bind_router, connect_dealer, connect_dealer_async, send_to


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('z')}/s.sock"


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(5000), "nothing arrived"
    return socket.recv_multipart()


def test_messages_travel_both_ways_under_the_peers_name(context: zmq.Context[Any], endpoint: str) -> None:
    dealer = connect_dealer(context, endpoint, b"api:0")  # may come before the bind: it connects when it can
    router = bind_router(context, endpoint)
    dealer.send(encode(Inquiry("api:0")))
    identity, frame = receive(router)
    assert (identity, decode(frame)) == (b"api:0", Inquiry("api:0"))
    handles = np.arange(5, dtype=np.int32)
    assert send_to(router, b"api:0", Cancel(handles))
    (frame,) = receive(dealer)
    answer = decode(frame)
    assert isinstance(answer, Cancel)
    np.testing.assert_array_equal(answer.handles, handles)


def test_an_unknown_or_vanished_peer_is_told_at_once(context: zmq.Context[Any], endpoint: str) -> None:
    router = bind_router(context, endpoint)
    assert not send_to(router, b"nobody", Goodbye("x"))
    dealer = connect_dealer(context, endpoint, b"api:0")
    dealer.send(encode(Inquiry("api:0")))
    receive(router)
    dealer.close()
    for _ in range(500):
        if not send_to(router, b"api:0", Goodbye("x")):
            return
        router.poll(10)
    pytest.fail("a closed peer was never noticed")


def test_a_peer_that_stops_reading_is_refused_not_waited_for(
    context: zmq.Context[Any], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.sockets.HIGH_WATER_MARK", 10)
    router = bind_router(context, endpoint)
    dealer = connect_dealer(context, endpoint, b"slow")
    dealer.send(encode(Inquiry("slow")))
    receive(router)
    block = Cancel(np.zeros(100_000, np.int32))
    taken = next(count for count in range(1000) if not send_to(router, b"slow", block))
    assert taken >= 10
    for _ in range(taken):
        receive(dealer)
    deadline = time.monotonic() + 10
    while not send_to(router, b"slow", block):  # the peer's credit comes back by itself, a moment later
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_peer_that_comes_back_takes_its_name_over(context: zmq.Context[Any], endpoint: str) -> None:
    router = bind_router(context, endpoint)
    old = connect_dealer(context, endpoint, b"worker:0")
    old.send(encode(Inquiry("old")))
    assert decode(receive(router)[1]) == Inquiry("old")
    new = connect_dealer(context, endpoint, b"worker:0")
    new.send(encode(Inquiry("new")))
    assert decode(receive(router)[1]) == Inquiry("new")
    assert send_to(router, b"worker:0", Goodbye("now"))
    assert decode(receive(new)[0]) == Goodbye("now")


def test_a_dealer_finds_a_scheduler_that_was_restarted(context: zmq.Context[Any], endpoint: str) -> None:
    first = bind_router(context, endpoint)
    dealer = connect_dealer(context, endpoint, b"api:0")
    dealer.send(encode(Inquiry("1")))
    receive(first)
    first.close()
    second = bind_router(context, endpoint)
    for _ in range(100):
        dealer.send(encode(Inquiry("2")))
        if second.poll(50):
            break
    assert decode(receive(second)[1]) == Inquiry("2")


async def test_the_async_dealer_is_the_same(endpoint: str) -> None:
    context = zmq.asyncio.Context()
    plain: zmq.Context[Any] = zmq.Context()
    try:
        router = bind_router(plain, endpoint)
        dealer = connect_dealer_async(context, endpoint, b"api:1")
        await dealer.send(encode(Inquiry("api:1")))
        identity, _ = receive(router)
        assert send_to(router, identity, Goodbye("x"))
        assert decode(await dealer.recv()) == Goodbye("x")
    finally:
        plain.destroy(linger=0)
        context.destroy(linger=0)


def test_the_socket_file_is_inside_a_private_folder(context: zmq.Context[Any], endpoint: str) -> None:
    bind_router(context, endpoint)
    assert Path(endpoint.removeprefix("ipc://")).is_socket()
