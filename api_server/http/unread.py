"""Measures for how long a client has read nothing of an answer that waits for it.

The kernel of a client acknowledges bytes as long as it has room for them, and a client makes room by reading. The clock
therefore counts acknowledged bytes while others wait in this process. Knows sockets; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import socket
import struct

# The offset of tcpi_bytes_acked in Linux's struct tcp_info, and the bytes of that structure to read.
_ACKED_AT = 120
_INFO_BYTES = 128
# SO_LINGER on with 0 seconds: closing discards unsent bytes in the kernel, and resets the connection.
_DISCARD = struct.pack("ii", 1, 0)


class Unread:
    """The clock of one connection. It is read from time to time, and costs nothing in between."""

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self._transport = transport
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._acked = 0
        self._since = now

    def seconds(self, now: float) -> float:
        """Seconds since the client last read something; 0 while nothing waits for it."""
        acked = self._bytes_acked() if self._transport.get_write_buffer_size() else None
        if acked is None or acked != self._acked:
            self._acked = acked or 0
            self._since = now
        return now - self._since

    def drop(self) -> None:
        """Ends the connection at once, with all that waits."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD)
        self._transport.abort()

    def _bytes_acked(self) -> int:
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        found: int = struct.unpack_from("=Q", info, _ACKED_AT)[0]
        return found
