"""Frames that no process of ours would send, thrown at the scheduler's sockets.

From a peer on this machine they reach the decoder: random bytes, real messages cut, with bits turned, or of another
version, and messages that only the other side may send. Orders and introductions of workers are never sent whole: a
peer that is let in may give orders, and would.
"""

from __future__ import annotations

import random
import socket
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from interfaces import (
    Cancel,
    Detach,
    Goodbye,
    Hello,
    Inquiry,
    Order,
    Retire,
    SamplingParams,
    SchedulingOptions,
    StepResult,
    Submit,
    TextContext,
    WorkerGoodbye,
    WorkerHello,
    encode,
)

_INTS = np.arange(5, dtype=np.int32)


def _messages(rng: random.Random) -> list[bytes]:
    """Real ones; whatever they do touches the sender alone."""
    params = SamplingParams(max_new_tokens=rng.randint(0, 9), temperature=rng.random(), seed=rng.getrandbits(60))
    context = TextContext.from_prompt([rng.randrange(600) for _ in range(rng.randint(1, 40))], params)
    scheduling = SchedulingOptions(
        tenant="fuzz", resume=rng.choice(["", "a", "b"]), total_seconds=rng.choice([None, 0.5])
    )
    result = StepResult(rng.getrandbits(30), 0, 0, 1, _INTS, _INTS, None, {}, 1)
    return [
        encode(Submit(rng.getrandbits(31), context, scheduling)),
        encode(Cancel(_INTS)),
        encode(Detach(_INTS)),
        encode(Hello("fuzz")),
        encode(Goodbye("fuzz")),
        encode(Inquiry("x")),
        encode(Retire(0, "x")),
        encode(WorkerGoodbye(0, 10**6)),
        encode(result),
    ]


def _powerful() -> list[bytes]:
    """Real ones that would change the whole server."""
    hello = WorkerHello("cpu", 0, 10**6, 1, 9, 16, 9, 99, 600, "x", "float32", "x")
    return [encode(Order(1, action, [""])) for action in range(5)] + [encode(hello)]


def frames(rng: random.Random) -> list[bytes]:
    """The frames of one message."""
    kind = rng.randrange(8)
    if kind == 0:
        return [rng.randbytes(rng.choice([0, 1, 5, 50, 5000])) for _ in range(rng.choice([1, 1, 2, 9]))]
    if kind == 1:
        data = rng.choice(_powerful())
        return [data[: rng.randrange(len(data))]]
    data = rng.choice(_messages(rng))
    if kind in (2, 3):
        return [data]
    if kind == 4:
        return [data[: rng.randrange(len(data))] + rng.randbytes(rng.randint(0, 20))]
    if kind == 5:
        return [data, data]
    if kind == 6:
        return [zlib.compress(data)]
    return [_with_bits_turned(data, rng)]


def _with_bits_turned(data: bytes, rng: random.Random) -> bytes:
    """The version and the tag stay as they are, so that the fields are what is wrong."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        changed[rng.randrange(3, len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def throw(endpoint: str, count: int, seed: int) -> None:
    """From peers of several names that come and go."""
    rng = random.Random(seed)
    context: zmq.Context[Any] = zmq.Context()
    try:
        for start in range(0, count, 500):
            peer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
            peer.setsockopt(zmq.IDENTITY, rng.choice([rng.randbytes(8) + b"x", b"fuzz", b"worker:9:9:9"]))
            peer.connect(endpoint)
            for _ in range(min(500, count - start)):
                peer.send_multipart(frames(rng))
            peer.close(linger=5000)
    finally:
        context.term()


def noise(path: Path, count: int, seed: int) -> None:
    """Bytes that are no ZeroMQ at all, into the socket itself."""
    rng = random.Random(seed)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for _ in range(count):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            start = greeting[: rng.randint(0, 64)] if rng.random() < 0.5 else b""
            try:
                raw.sendall(start + rng.randbytes(rng.choice([0, 1, 64, 4000])))
            except OSError:
                continue  # it hung up in the middle, which is right
