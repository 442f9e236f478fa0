"""How many connections a socket that publishes has, and the end of those beyond.

ZeroMQ accepts every connection, and keeps a queue for each. Its monitor says which came and went.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.sockets import readable

log = logging.getLogger(__name__)


class Subscribers:
    """The connections of a socket that will be bound at `endpoint`. `look` ends those that came last, beyond `most`."""

    def __init__(self, context: zmq.Context[Any], publisher: zmq.Socket[bytes], endpoint: str, most: int) -> None:
        self._publisher = publisher
        self._endpoint = endpoint
        self._port = int(endpoint.rpartition(":")[2])
        self._most = most
        # Descriptors, the oldest connection first.
        self._connected: dict[int, None] = {}
        self._said = False
        name = f"inproc://subscribers-{id(self)}"
        publisher.monitor(name, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        # An event that is lost would count for ever.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(name)

    def __len__(self) -> int:
        return len(self._connected)

    def look(self) -> None:
        """Take the events since the last call."""
        while readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connected[int(event["value"])] = None
            else:
                self._connected.pop(int(event["value"]), None)
        for descriptor in [*self._connected][self._most :]:
            self._end(descriptor)

    def close(self) -> None:
        self._publisher.disable_monitor()
        self._monitor.close(linger=0)

    def _end(self, descriptor: int) -> None:
        """Break a connection. Its descriptor may be another's by now, which has another port."""
        if not self._said:
            self._said = True
            log.warning(
                "%s has %d subscribers, which are the most; further ones are sent away", self._endpoint, self._most
            )
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family != socket.AF_UNIX and connection.getsockname()[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)
