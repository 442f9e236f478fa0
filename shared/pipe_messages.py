"""msgpack messages through a pipe between two processes of one server: out of it their bytes come in pieces of any
size.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from typing import Any

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


async def send_message(process: Process, message: Any) -> None:
    """Send a message to a child's standard input. Raises OSError when the child is gone.

    asyncio and uvloop say differently that a pipe is closed: by BrokenPipeError, by ConnectionResetError, or by a
    RuntimeError about a handle.
    """
    assert process.stdin is not None
    data = msgpack.packb(message)
    if process.stdin.is_closing():
        raise BrokenPipeError(f"process {process.pid} reads no more")
    process.stdin.write(data)
    await process.stdin.drain()


async def end_process(process: Process, reading: asyncio.Task[None]) -> None:
    """Kill a child that takes no message, and wait until the task that reads its answers has seen its end.

    A pipe breaks before that: a request that was sent again at once would go to the same dead child.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await asyncio.shield(reading)
