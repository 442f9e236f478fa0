"""The published changes of prefix caches: an index that is built from them alone is that of the scheduler."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from typing import Any, cast

import msgpack
import pytest
import zmq

from interfaces import SamplingParams, Submit, TextContext
from scheduler import kv_events
from scheduler.kv_events import MAX_READERS, MAX_SUBSCRIBERS, READER_SECONDS, TURN_BATCHES, TURN_REQUESTS, KvEvents
from shared.settings import SettingsError
from tests.scheduler.clock import Clock
from tests.scheduler.test_core import REPLICA, Yard
from tests.system.server import free_port


class Reader:
    """Keeps an index as routers of others do: hashes by worker, and the tokens of each chain."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self.socket.subscribe(b"kv@")
        self.socket.connect(endpoint)
        self.numbers: list[int] = []
        self.held: dict[int, set[int]] = {}
        self.tokens: dict[int, list[int]] = {}

    def subscribe(self, events: KvEvents) -> None:
        """Wait until the subscription has arrived: events of a worker that is none are heard from then on."""
        while not self.socket.poll(20):
            events._send([["AllBlocksCleared"]], 99)

    def read(self, last: int) -> None:
        """Read up to batch number `last`."""
        while not self.numbers or self.numbers[-1] < last:
            assert self.socket.poll(60_000)
            topic, number, batch = self.socket.recv_multipart()
            assert topic.endswith(b"@model")
            self.numbers.append(int.from_bytes(number, "big"))
            self.take(batch)

    def take(self, batch: bytes) -> None:
        _, events, worker = msgpack.unpackb(batch)
        held = self.held.setdefault(worker, set())
        for name, *fields in events:
            if name == "BlockStored":
                hashes, parent, tokens, size, adapter, medium = fields
                assert (adapter, medium, len(tokens)) == (None, "GPU", size * len(hashes))
                before = [] if parent is None else self.tokens[parent]
                for number, digest in enumerate(hashes):
                    self.tokens[digest] = [*before, *tokens[: (number + 1) * size]]
                held.update(hashes)
            elif name == "BlockRemoved":
                held.difference_update(fields[0])
            else:
                assert name == "AllBlocksCleared"
                held.clear()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def published(context: zmq.Context[Any], yard: Yard, clock: Clock | None = None) -> tuple[KvEvents, str]:
    for _ in range(50):
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        try:
            events = KvEvents(context, endpoint, "model", clock=clock or Clock())
        except SettingsError:
            continue  # the next port is taken
        events.attach(yard.scheduler.workers)
        return events, endpoint
    raise AssertionError("no two ports that follow each other are free")


def turn(yard: Yard, events: KvEvents) -> bool:
    going = yard.turn()
    events.attach(yard.scheduler.workers)
    events.publish(yard.scheduler.workers)
    return going


def found(yard: Yard, index: int) -> set[int]:
    return {int.from_bytes(digest[:8], "big") for digest in yard.scheduler.workers[index].pool._block_of}


def test_an_index_made_of_the_events_is_the_schedulers(context: zmq.Context[Any]) -> None:
    yard = Yard(workers=2, num_blocks=30)
    events, endpoint = published(context, yard)
    reader = Reader(context, endpoint)
    reader.subscribe(events)
    rng = random.Random(1)
    prompts = {}
    for handle in range(30):
        prompts[handle] = list(range(rng.choice([0, 8, 20]))) + [rng.randrange(900) for _ in range(rng.randint(1, 20))]
        yard.submit(handle, prompts[handle], 6, [])
        turn(yard, events)
    while turn(yard, events):
        pass
    reader.read(events._number - 1)
    assert reader.numbers == list(range(reader.numbers[0], events._number)), "none is missing"
    for index in (0, 1):
        assert reader.held[index] == found(yard, index)
    known = [prompts[handle] + yard.tokens[handle] for handle in prompts]
    for digest in found(yard, 0):
        tokens = reader.tokens[digest]
        assert any(tokens == sequence[: len(tokens)] for sequence in known)
    yard.start_worker(0, epoch=1)
    events.attach(yard.scheduler.workers)
    reader.read(events._number - 1)
    assert reader.held[0] == set()


def test_salted_prompts_are_not_published(context: zmq.Context[Any]) -> None:
    yard = Yard()
    events, _ = published(context, yard)
    params = SamplingParams(seed=1, max_new_tokens=3)
    salted = TextContext.from_prompt(range(21), params, cache_salt="tenant")
    yard.scheduler.submit(REPLICA, Submit(1, salted))
    yard.drain()
    worker = yard.scheduler.workers[0]
    assert worker.pool.cached
    assert worker.beginnings.kv_log is not None
    assert worker.beginnings.kv_log.take() == []
    worker.pool.forget_cached()
    assert worker.beginnings.kv_log.take() == []
    events.close()


def test_missed_batches_can_be_had_again(context: zmq.Context[Any]) -> None:
    yard = Yard()
    events, endpoint = published(context, yard)
    for handle in range(5):
        yard.submit(handle, [handle] * 9, 3, [])
        while turn(yard, events):
            pass
    host, port = endpoint.rsplit(":", 1)
    late = Reader(context, endpoint)
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.connect(f"{host}:{int(port) + 1}")
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    numbers = []
    while not dealer.poll(50):
        events.publish(yard.scheduler.workers)
    while True:
        while not dealer.poll(20):
            events.publish(yard.scheduler.workers)
        _, number, batch = dealer.recv_multipart()
        if number == b"\xff" * 8:
            break
        numbers.append(int.from_bytes(number, "big"))
        late.take(batch)
    assert numbers == list(range(len(numbers)))
    assert late.held[0] == found(yard, 0)


def asking(context: zmq.Context[Any], endpoint: str, events: KvEvents, identity: bytes, first: int = 0) -> Any:
    """A reader whose request has come."""
    host, port = endpoint.rsplit(":", 1)
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, identity)
    dealer.connect(f"{host}:{int(port) + 1}")
    dealer.send_multipart([b"", first.to_bytes(8, "big")])
    assert events.requests.poll(60_000)
    return dealer


def test_a_turn_of_the_loop_sends_few_batches_again(context: zmq.Context[Any]) -> None:
    events, endpoint = published(context, Yard())
    for _ in range(3 * TURN_BATCHES):
        events._send([["AllBlocksCleared"]], 99)
    dealer = asking(context, endpoint, events, b"reader")
    for turns in (1, 2, 3):
        assert (turns > 1) == events.owes
        events.publish({})
        for number in range((turns - 1) * TURN_BATCHES, turns * TURN_BATCHES):
            assert dealer.poll(60_000)
            assert dealer.recv_multipart()[1] == number.to_bytes(8, "big")
        assert not dealer.poll(20)
    assert events.owes
    events.publish({})
    assert dealer.poll(60_000)
    assert dealer.recv_multipart()[1] == b"\xff" * 8
    assert not events.owes


class Replay:
    """A socket whose requests are a list, and whose readers may take nothing more."""

    def __init__(self) -> None:
        self.requests: list[tuple[bytes, int]] = []
        self.sent: list[tuple[bytes, int]] = []
        self.full = False

    def recv_multipart(self, flags: int) -> list[bytes]:
        identity, number = self.requests.pop(0)
        return [identity, b"", number.to_bytes(8, "big")]

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        if self.full:
            raise zmq.Again
        self.sent.append((frames[0], int.from_bytes(frames[2], "big", signed=True)))


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Replay:
    made = Replay()
    monkeypatch.setattr(kv_events, "readable", lambda socket: bool(socket.requests))
    return made


def test_readers_and_their_requests_are_bounded_and_take_turns(context: zmq.Context[Any], replay: Replay) -> None:
    events, _ = published(context, Yard())
    for _ in range(5):
        events._send([["AllBlocksCleared"]], 99)
    events._replay.close(linger=0)
    events._replay = cast(Any, replay)
    replay.requests = [(b"a", 0), (b"b", 3), (b"a", 4)]
    for _ in range(3):
        events.publish({})
    assert replay.sent == [(b"b", 3), (b"b", 4), (b"b", -1), (b"a", 4), (b"a", -1)], "the later request counts"
    replay.requests = [(b"%d" % number, 0) for number in range(5 * MAX_READERS)]
    replay.full = True
    events.publish({})
    assert len(replay.requests) == 5 * MAX_READERS - TURN_REQUESTS
    while replay.requests:
        events.publish({})
        assert len(events._readers) <= MAX_READERS


def test_a_reader_that_takes_nothing_is_given_up(context: zmq.Context[Any], replay: Replay) -> None:
    clock = Clock()
    events, _ = published(context, Yard(), clock)
    events._send([["AllBlocksCleared"]], 99)
    events._replay.close(linger=0)
    events._replay = cast(Any, replay)
    replay.requests = [(b"a", 0)]
    replay.full = True
    events.publish({})
    clock.advance(READER_SECONDS - 1)
    events.publish({})
    assert events.owes
    clock.advance(2)
    events.publish({})
    assert not events.owes


def test_what_is_kept_is_bounded_in_bytes(context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "KEPT_BYTES", 1000)
    events, endpoint = published(context, Yard())
    for _ in range(100):
        events._send([["BlockRemoved", [1] * 50, "GPU"]], 0)
    assert sum(map(len, events._kept)) == events._kept_bytes <= 1000
    dealer = asking(context, endpoint, events, b"reader")
    events.publish({})
    assert dealer.poll(60_000)
    assert dealer.recv_multipart()[1] == (100 - len(events._kept)).to_bytes(8, "big")


def test_other_addresses_want_keys(context: zmq.Context[Any]) -> None:
    with pytest.raises(SettingsError, match=r"kv_events 'tcp://0.0.0.0:5557'.*worker_endpoint and curve_keys"):
        KvEvents(context, "tcp://0.0.0.0:5557", "model")


def test_subscribers_are_bounded(context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_SUBSCRIBERS <= 64
    monkeypatch.setattr(kv_events, "MAX_SUBSCRIBERS", 2)
    yard = Yard()
    events, endpoint = published(context, yard)
    try:
        readers = [Reader(context, endpoint) for _ in range(2)]
        for reader in readers:
            reader.subscribe(events)
        host, port = endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as further:
            # The end of its connection is all that the third one hears after ZeroMQ's greeting.
            received = [b"greeting"]
            further.settimeout(0.02)
            end = time.monotonic() + 60
            while received[-1] and time.monotonic() < end:
                events.publish(yard.scheduler.workers)
                with contextlib.suppress(TimeoutError):
                    received.append(further.recv(100))
            assert received[-1] == b""
        events._send([["AllBlocksCleared"]], 99)
        for reader in readers:
            reader.read(events._number - 1)  # the others stay
        # Who leaves makes room for another.
        readers[0].socket.close(linger=0)
        end = time.monotonic() + 60
        while len(events._subscribers) > 1 and time.monotonic() < end:
            events.publish(yard.scheduler.workers)
        another = Reader(context, endpoint)
        another.subscribe(events)
        events.publish(yard.scheduler.workers)
        assert len(events._subscribers) == 2
    finally:
        events.close()
