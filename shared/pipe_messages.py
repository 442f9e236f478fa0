"""msgpack messages out of a pipe between two processes of one server, whose bytes come in pieces of any size."""

from __future__ import annotations

import msgpack

MOST_BYTES = 1 << 30
"""Of one message. Who writes is our own, but what it writes of may be a client's: a grammar, say."""
_FIRST_BYTES = 4096


def message_unpacker() -> msgpack.Unpacker:
    """Takes pieces by `feed`, and is iterated for the messages that are complete.

    It begins with a small buffer, which grows to what a message needs. Left to itself it takes a megabyte and walks
    through that before it begins anew, so that a process seems to leak for an hour.
    """
    return msgpack.Unpacker(strict_map_key=False, max_buffer_size=MOST_BYTES, read_size=_FIRST_BYTES)
