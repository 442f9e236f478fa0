"""msgpack messages out of a pipe between two processes of one server, whose bytes come in pieces of any size."""

from __future__ import annotations

import msgpack

# Maximum bytes of one message. The writer is our own, but part of its content may be a client's: a grammar, say.
MOST_BYTES = 1 << 30
_FIRST_BYTES = 4096


def message_unpacker() -> msgpack.Unpacker:
    """Make an unpacker that takes pieces by `feed` and is iterated for the messages that are complete.

    It begins with a small buffer, which grows to the size of a message. The library's default is a megabyte that is
    walked through before it begins anew, so that a process seems to leak for an hour.
    """
    return msgpack.Unpacker(strict_map_key=False, max_buffer_size=MOST_BYTES, read_size=_FIRST_BYTES)
