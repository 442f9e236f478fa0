"""Messages that come in pieces, and what they leave in memory."""

from __future__ import annotations

import random
import tracemalloc

import msgpack

from shared.pipe_messages import message_unpacker


def test_messages_come_out_whole_however_they_are_cut() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    sent = [[i, {7: "x" * rng.randrange(20_000)}, [None, b"\xff"]] for i in range(50)]
    data, unpacker, heard = b"".join(msgpack.packb(message) for message in sent), message_unpacker(), []
    while data:
        size = rng.choice([1, 3, 1000, 70_000])
        unpacker.feed(data[:size])
        heard += list(unpacker)
        data = data[size:]
    assert heard == sent, f"seed {seed}"


def test_small_messages_take_little_memory() -> None:
    tracemalloc.start()
    try:
        unpacker = message_unpacker()
        for number in range(20_000):
            unpacker.feed(msgpack.packb([number, {}, {3: [1, 2, 3]}]))
            assert [message[0] for message in unpacker] == [number]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 1 << 16
