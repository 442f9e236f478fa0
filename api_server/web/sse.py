"""Server-sent events: frames, a comment during silence, and an end that is always noticed.

Knows the event-stream format and ASGI's send; knows no dialect. A dialect whose streams have another form gives its
media type, and what is written during silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_server.errors import RequestFailed
from api_server.web.endpoint import internal_error

log = logging.getLogger("tokenyard")

KEEP_ALIVE_SECONDS = 15.0
DONE = b"data: [DONE]\n\n"
_MEDIA_TYPE = "text/event-stream"


def _comment() -> bytes:
    return b":\n\n"


def frame(value: Any) -> bytes:
    """One event: `data: `, the value as JSON, an empty line."""
    data = orjson.dumps(value)
    return b"data: " + (data if data.isascii() else _in_one_line(data)) + b"\n\n"


# Characters that end no line of an event stream, but a line of Unicode text, and so of many clients.
_LINE_ENDS = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029", "\u0085".encode(): b"\\u0085"}


def _in_one_line(data: bytes) -> bytes:
    for character, escape in _LINE_ENDS.items():
        data = data.replace(character, escape)
    return data


def named_frame(value: Mapping[str, Any]) -> bytes:
    """One event that repeats its `type` as the event's name, for clients that dispatch by it."""
    return f"event: {value['type']}\n".encode() + frame(value)


class EventStream(Response):
    """Sends the frames of an async iterator as they come; calls `close` at every kind of end.

    The status is 200 already when something fails, so the failure becomes one last event, `error_frame(error)`.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        close: Callable[[], None],
        error_frame: Callable[[RequestFailed], bytes],
        media_type: str = _MEDIA_TYPE,
        keep_alive: Callable[[], bytes] = _comment,
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self._keep_alive = keep_alive
        self.background = None
        self.body = b""
        self._frames = frames
        self._close = close
        self._error_frame = error_frame
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pulse = _Pulse(send, self._keep_alive)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pulse.start()
            await self._send_frames(pulse, scope)
            pulse.stop()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            pulse.stop()
            self._close()

    async def _send_frames(self, pulse: _Pulse, scope: Scope) -> None:
        try:
            resume = scope["state"].get("resume")
            async for data in self._frames:
                if resume is None:
                    await pulse.send(data)
                elif marked := resume.mark(data):
                    await pulse.send(marked)
        except RequestFailed as error:
            await self._fail(error, pulse, scope)
        except Exception:
            request_id = scope["state"]["request_id"]
            log.exception("the stream of request %s broke by an error of ours", request_id)
            await self._fail(internal_error(request_id), pulse, scope)

    async def _fail(self, error: RequestFailed, pulse: _Pulse, scope: Scope) -> None:
        scope["state"]["server"].record_failure(scope["path"], error)
        await pulse.send(self._error_frame(error))


class _Pulse:
    """Writes a comment line when nothing has been written for a while, so that proxies keep the connection.

    One timer per stream looks at the clock, instead of one timer per frame.
    """

    def __init__(self, send: Send, keep_alive: Callable[[], bytes]) -> None:
        self._send = send
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._sending = False
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()
        self._timer = self._beat = None

    async def send(self, data: bytes) -> None:
        self._sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._last = self._loop.time()
        self._sending = False

    def _look(self) -> None:
        silence = self._loop.time() - self._last
        # While a send is stuck the client is slow, not the model: a keep-alive would be useless.
        if silence >= KEEP_ALIVE_SECONDS and not self._sending:
            self._beat = self._loop.create_task(self._comment())
            silence = 0.0
        self._timer = self._loop.call_later(max(KEEP_ALIVE_SECONDS - silence, 0.05), self._look)

    async def _comment(self) -> None:
        with contextlib.suppress(OSError):
            await self.send(self._keep_alive())
