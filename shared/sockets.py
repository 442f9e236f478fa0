"""ZeroMQ sockets as this system uses them: a message in a frame, bounded queues, nothing that blocks on a dead peer.

The scheduler binds ROUTERs; replicas and workers connect DEALERs. A ROUTER that meets a full or vanished peer says so
at once (`send_to` returns False) instead of waiting or dropping in silence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from interfaces import encode
from shared.curve import secure_connection

# Messages queued to one peer. At one message a step this is minutes of silence.  A peer that far behind is treated as
# dead.
HIGH_WATER_MARK = 10_000

# As plain numbers: combining zmq's enums costs more than sending a small message.
_NOW = int(zmq.NOBLOCK)
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)

# Without what pyzmq's own `send` does for other kinds of sockets, which takes longer than sending.
_send = zmq.backend.Socket.send
_poll = zmq.backend.zmq_poll

MAX_MESSAGE_BYTES = 256 * 1024 * 1024


def same_host(endpoint: str) -> bool:
    """Whether a peer at the endpoint is a process of this host and user, whose shared memory can be opened here."""
    return endpoint.startswith("ipc://")


def bind_router(context: zmq.Context[Any], endpoint: str) -> zmq.Socket[bytes]:
    """Bind a ROUTER to `endpoint`; a peer that reconnects under its old identity takes it over."""
    socket = router(context)
    socket.bind(endpoint)
    return socket


def router(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    """A ROUTER that is bound nowhere yet."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    _bound(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket


def connect_dealer(
    context: zmq.Context[Any], endpoint: str, identity: bytes, keys: Path | None = None
) -> zmq.Socket[bytes]:
    """Connect a DEALER to `endpoint` under `identity`; it reconnects by itself. tcp endpoints need `keys`."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    if endpoint.startswith("tcp:"):
        if keys is None:
            raise ValueError(f"{endpoint} cannot be used without CURVE keys")
        secure_connection(socket, keys)
    _connect(socket, endpoint, identity)
    return socket


def connect_dealer_async(context: zmq.asyncio.Context, endpoint: str, identity: bytes) -> zmq.asyncio.Socket:
    """Connect a DEALER of an asyncio process to `endpoint` under `identity`."""
    socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
    _connect(socket, endpoint, identity)
    return socket


def send_to(router: zmq.Socket[bytes], identity: bytes, *messages: Any) -> bool:
    """Send to one peer of a ROUTER without waiting; False when the peer is gone or has stopped reading.

    Several messages go as frames of one, which wakes the peer once.
    """
    frames = [encode(message) for message in messages]
    try:
        _send(router, identity, _NOW_AND_MORE)
        for frame in frames[:-1]:
            _send(router, frame, _NOW_AND_MORE, copy=False)
        _send(router, frames[-1], _NOW, copy=False)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message has come. Asking is cheaper than the exception of a receive in vain.

    A poll is cheaper than reading EVENTS, which looks up the option's name in Python.
    """
    return bool(_poll([(socket, _READABLE)], 0))


def receive_from(router: zmq.Socket[bytes]) -> tuple[bytes, list[bytes]] | None:
    """Receive the next message of a ROUTER: the peer's identity and the frames. None when there is none."""
    try:
        identity = router.recv(_NOW)
        # A frame knows whether another follows; asking the socket takes longer than receiving.
        frames = [frame := router.recv(_NOW, copy=False)]
        while frame.more:
            frames.append(frame := router.recv(_NOW, copy=False))
    except zmq.Again:
        return None
    return identity, [frame.bytes for frame in frames]


def frames_of(dealer: zmq.Socket[bytes]) -> list[bytes]:
    """Receive the next message of a DEALER. Empty when there is none."""
    try:
        frames = [frame := dealer.recv(_NOW, copy=False)]
        while frame.more:
            frames.append(frame := dealer.recv(_NOW, copy=False))
    except zmq.Again:
        return []
    return [frame.bytes for frame in frames]


def _connect(socket: Any, endpoint: str, identity: bytes) -> None:
    _bound(socket)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.connect(endpoint)


def _bound(socket: Any) -> None:
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
