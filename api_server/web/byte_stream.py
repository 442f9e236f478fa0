"""An answer of bytes that are sent as they come, such as sound.

Knows ASGI's send; knows no dialect and no format.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_server.errors import RequestFailed

log = logging.getLogger("tokenyard")


class ByteStream(Response):
    """Sends the parts of an async iterator; calls `close` at every kind of end.

    The status is 200 already when something fails, and bytes have no place for an error. So the answer is left
    incomplete: the connection is closed, and the client sees that the end is missing.
    """

    def __init__(
        self, parts: AsyncIterator[bytes], close: Callable[[], None], media_type: str, headers: Mapping[str, str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = media_type
        self._parts = parts
        self._close = close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if await self._send_parts(scope, send):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()

    async def _send_parts(self, scope: Scope, send: Send) -> bool:
        """Sends the parts. False when the rest will never come."""
        try:
            async for part in self._parts:
                if part:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except RequestFailed as error:
            scope["state"]["server"].record_failure(scope["path"], error)
            log.warning("the answer to request %s ends early: %s", scope["state"]["request_id"], error.message)
            return False
        return True
