"""One connection: uvicorn's protocol with its C parser, and the rules that an open port needs.

Bounds (`heads.py`) and clocks on a request that is not complete, and on an answer that is not read (`unread.py`);
offers to upgrade, which are ignored as RFC 9110 allows, with their bodies read; HTTP/1.0 without chunks; and clients
that have shut down their sending side, who get their answer if they are still there. Knows HTTP/1.1; knows no route.

It builds upon the inside of uvicorn, whose version is pinned for that reason: `data_received` and `eof_received` are
replaced, every other method is called with a rule around it. tests/api_server/http has a test of each rule.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api_server.http import descriptors
from api_server.http.heads import MAX_HEAD_BYTES, MAX_URL_BYTES, Refused, answer, check, check_count
from api_server.http.unread import Unread

log = logging.getLogger("tokenyard")

# Time for a head, from its first byte or from the start of the connection; for a body, from one piece to the next.
REQUEST_SECONDS = 30.0

# A body that trickles in holds a connection and a part of the budget of bodies. So it has REQUEST_SECONDS as a
# whole, and one more second for each of this many bytes (Apache's RequestReadTimeout has 500 by default).
BODY_BYTES_PER_SECOND = 1000

# A client with a small window shows that it reads only when half of that window is free again. At this limit one that
# takes 16 bytes a second through a window of 8 KiB is far from being cut off.
UNREAD_SECONDS = 300.0

# Requests that are read while an earlier answer is under way.
MOST_WAITING = 8

# A refused client that is still sending would lose the answer if its connection were closed at once.
LINGER_SECONDS = 2.0

# Shortest time between two looks at the clock of a connection.
SHORTEST_LOOK_SECONDS = 0.05

# Time between two checks for the presence of a client that sends no more.
PEER_LOOK_SECONDS = 0.05

# The beginning of every answer.
_ANY_ANSWER = b"HTTP/1.1 "


# Reading state of the current request; `_NOTHING`: no byte of the connection's first request has come. Plain numbers:
# to look up a member of an enumeration costs more than the rest of a callback, ten times a request.
_NOTHING, _HEAD, _BODY, _COMPLETE = range(4)


class HttpProtocol(HttpToolsProtocol):
    """The protocol class for `uvicorn.Config(http=...)`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._phase = _NOTHING
        # Bytes since the last piece of a body: a head, sizes and extensions of chunks, trailers.
        self._overhead = 0
        # True when nothing more is read from this client.
        self._reading_ended = False
        self._heard = self.loop.time()
        self._body_began = self._heard
        self._body_bytes = 0
        self._unread: Unread  # from `connection_made` on
        self._clock: asyncio.TimerHandle | None = None
        # The request whose answer is sent or awaited; further ones wait in `pipeline`.
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unread = Unread(transport, self.loop.time())
        self._clock = self.loop.call_later(REQUEST_SECONDS, self._look_at_clock)
        if descriptors.are_short(len(self.connections)):
            self._reading_ended = True
            self._answer(Refused(503, "this server has as many connections as it can hold; come again in a moment"))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    # What comes in

    def data_received(self, data: bytes) -> None:
        if self._phase >= _BODY:
            self._heard = self.loop.time()
        while data and not self._reading_ended:
            room = MAX_HEAD_BYTES - self._overhead
            piece = data[:room]
            data = data[room:]
            self._overhead += len(piece)
            data = self._feed(piece) + data
            if self._overhead >= MAX_HEAD_BYTES:
                self._refuse(self._too_large())

    def _feed(self, piece: bytes) -> bytes:
        """Feeds the parser; returns the unread rest of the piece, which belongs to another parser."""
        try:
            self.parser.feed_data(piece)
            check_count(self.headers or ())
        except httptools.HttpParserUpgrade as pause:
            return self._decline_upgrade(piece[pause.args[0] :])
        except Refused as refused:
            self._refuse(refused)
        except httptools.HttpParserError as error:
            self._refuse(_refused(error))
        return b""

    def _decline_upgrade(self, rest: bytes) -> bytes:
        """Declines an upgrade: the parser has skipped the body, so a new one gets the body's framing."""
        self._overhead -= len(rest)
        framing = [h for h in self.scope["headers"] if h[0] in (b"content-length", b"transfer-encoding")]
        head = [b"POST / HTTP/%s\r\n" % self.scope["http_version"].encode(), *(b"%s: %s\r\n" % h for h in framing)]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"".join([*head, b"\r\n"]))
        return rest

    def _too_large(self) -> Refused:
        if self._phase == _HEAD and len(self.url) > MAX_URL_BYTES:
            return Refused(414, f"the URL is longer than {MAX_URL_BYTES} bytes")
        where = "sizes of chunks or trailers" if self._phase == _BODY else "the request line and headers"
        return Refused(431, f"{where} are larger than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        if self._phase == _BODY:
            return  # the second parser of a request
        self._unset_keepalive_if_required()
        self._phase = _HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._phase != _HEAD:
            return
        check(self.parser.get_http_version(), self.url, self.headers)
        super().on_headers_complete()
        if len(self.pipeline) < MOST_WAITING:
            self.flow.resume_reading()  # uvicorn stops at the first that waits, and so would not see the client leave
        self.headers = []  # trailers come here: they must not be taken for headers
        self._phase = _BODY
        self._heard = self._body_began = self.loop.time()
        self._body_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_decline_upgrade` reads its body
        self._overhead = 0
        self._phase = _COMPLETE
        super().on_message_complete()

    # What goes out

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answering = cycle
        if cycle.scope["http_version"] == "1.0":
            app = partial(_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase != _COMPLETE:
            self._unset_keepalive_if_required()  # its own clock runs

    def _refuse(self, refused: Refused) -> None:
        """Stops reading. The answer is sent if the client can match it to a request."""
        if self._reading_ended:
            return
        self._reading_ended = True
        log.info("refused a request from %s: %s", self.client[0] if self.client else "?", refused.reason)
        pending = self.cycle is not None and not self.cycle.response_complete
        if self._phase == _BODY:
            can_answer = pending and not self.cycle.response_started and not self.pipeline
        else:
            can_answer = not pending
        if can_answer:
            self._answer(refused)
            self._linger()
        elif self._phase == _BODY:
            self.transport.close()
        else:
            self.cycle.keep_alive = False  # requests before the one that is refused are answered first

    def _answer(self, refused: Refused) -> None:
        self.transport.write(answer(refused, STATUS_LINE[refused.status], self.server_state.default_headers))

    def _linger(self) -> None:
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    # Clients that send or read nothing

    def _look_at_clock(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused:
            self._heard = self._body_began = now  # this server paused the reading, not the client
            self._body_bytes = 0
        left = min(self._time_to_read(now), self._time_to_send(now))
        self._clock = self.loop.call_later(max(left, SHORTEST_LOOK_SECONDS), self._look_at_clock)

    def _time_to_read(self, now: float) -> float:
        """Checks the reading deadline and ends an overdue request. Returns the seconds until the next check."""
        if self._phase == _COMPLETE or self._reading_ended:
            return REQUEST_SECONDS
        left = self._heard + REQUEST_SECONDS - now
        if self._phase == _BODY:
            whole = REQUEST_SECONDS + self._body_bytes / BODY_BYTES_PER_SECOND
            left = min(left, self._body_began + whole - now)
        if left > 0:
            return left
        if self._phase == _NOTHING:
            self.transport.close()
        else:
            self._refuse(self._too_slow(now))
        return REQUEST_SECONDS

    def _too_slow(self, now: float) -> Refused:
        if self._phase == _HEAD:
            return Refused(408, f"the head is not complete after {REQUEST_SECONDS:.0f} s")
        if self._heard + REQUEST_SECONDS <= now:
            return Refused(408, f"the body has not gone on after {REQUEST_SECONDS:.0f} s")
        return Refused(408, f"the body comes more slowly than {BODY_BYTES_PER_SECOND} bytes a second")

    def _time_to_send(self, now: float) -> float:
        """Checks the sending deadline and ends an overdue connection. Returns the seconds until the next check."""
        left = UNREAD_SECONDS - self._unread.seconds(now)
        if left > 0:
            return left
        log.warning(
            "%s has read nothing of its answer for %.0f s: its connection is ended, and its request cancelled",
            self.client[0] if self.client else "?",
            UNREAD_SECONDS,
        )
        self._unread.drop()
        return UNREAD_SECONDS

    def eof_received(self) -> bool:  # type: ignore[override]
        """True when the connection stays, for the answer. Closing and shutting down the sending side look alike.

        A byte that the client must get next in any case distinguishes them: a socket that is closed resets the
        connection. asyncio's TLS cannot be half closed.
        """
        cycle = self._answering
        if self._phase == _BODY:
            self._refuse(Refused(400, "the connection ended before the body did"))
            return False
        if cycle is None or cycle.response_complete or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        if not cycle.response_started:
            self.transport.write(_ANY_ANSWER)
            cycle.transport = _Begun(self.transport)  # type: ignore[assignment]
        elif cycle.chunked_encoding:
            self.transport.write(b"0")  # of the next chunk's size
        elif cycle.scope["http_version"] == "1.0":
            return False  # there is no such byte
        self._look_at_peer()
        return True

    def _look_at_peer(self) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(PEER_LOOK_SECONDS, self._look_at_peer)


def _refused(error: httptools.HttpParserError) -> Refused:
    """The refusal for a parser's error, or for one that a callback raised: the rules of heads, and the URL parser."""
    if isinstance(error.__context__, Refused):
        return error.__context__
    in_callback = isinstance(error, httptools.HttpParserCallbackError)
    return Refused(400, "the URL cannot be read" if in_callback else f"this is no valid HTTP/1.1: {error}")


class _Begun:
    """A transport whose answer has begun before its request is known."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._sent = len(_ANY_ANSWER)

    def write(self, data: bytes) -> None:
        self._transport.write(data[self._sent :])
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def _without_chunks(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Runs HTTP/1.0, which has no chunks: a body of unknown length ends with the connection."""
    sized = False

    async def send_plain(message: Message) -> None:
        nonlocal sized
        if message["type"] == "http.response.start":
            sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if sized else False
        elif not sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_plain)
