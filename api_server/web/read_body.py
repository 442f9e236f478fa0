"""Reads a request's body within its bounds. Knows ASGI's receive and the book of all bodies."""

from __future__ import annotations

from starlette.types import Receive

from api_server.body.bodies import MAX_BODY_BYTES, Held
from api_server.errors import ErrorKind, RequestFailed

# A body over the limit is read up to here and thrown away: a client that is still sending would not see the answer.
MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES


class ClientGone(Exception):
    """The connection ended before the request was complete."""


async def read_body(receive: Receive, held: Held) -> bytearray:
    """Returns the body. Raises ClientGone, and RequestFailed for one that is too large."""
    body = bytearray()
    refused = None
    size = 0
    more = True
    while more and size <= MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if refused is None:
            refused = _taken(body, chunk, held)
    if refused is not None:
        raise refused
    return body


def _taken(body: bytearray, chunk: bytes, held: Held) -> RequestFailed | None:
    """Adds a chunk to the body. Returns the reason to keep no more of the body, or None."""
    if len(body) + len(chunk) > MAX_BODY_BYTES:
        body.clear()
        return RequestFailed(ErrorKind.BODY_TOO_LARGE, f"the request body is larger than {MAX_BODY_BYTES} bytes")
    try:
        held.add(chunk)
    except RequestFailed as error:
        body.clear()
        return error
    body += chunk
    return None
