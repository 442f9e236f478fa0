"""Ends an API process without losing requests: serves all that arrive, and asks clients to connect anew.

It is either stopped (SIGTERM, SIGINT: the whole server ends) or retired (SIGQUIT: another process accepts from the same
queue). In both cases answers say `Connection: close` from then on, and kept connections live on for a while, since a
request may be on its way on any of them. A stopped process accepts for a bounded time while clients come, and accepts
all connections in the listen queue before it closes the socket (doors.py). Knows uvicorn's connections; does not know
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from typing import Any

import uvicorn

from api_server.app import Application
from api_server.doors import Doors, accept_waiting, ignore_new
from api_server.engine.client import EngineClient
from api_server.http.protocol import HttpProtocol
from shared import liveness

# Time after the drain in which the ended requests send their last frames.
SECONDS_FOR_LAST_FRAMES = 3
# Without a request on any connection for this long, open connections are closed and the process ends. Load balancers
# that ask every second have noticed by then.
QUIET_SECONDS = 2.0
# Longest time for which a stopped server accepts connections because clients are there. A client that ignores
# `/ready` and `Connection: close` would otherwise keep it running for ever.
OPEN_SECONDS = 5.0
# Time for a TLS handshake that has begun, which is not a connection yet.
_HANDSHAKE_SECONDS = 0.5
# Time for the handshakes of TCP that have begun when new ones are ignored.
_SECONDS_FOR_HANDSHAKES = 0.1
_SECONDS_BETWEEN_LOOKS = 0.05


class Leaving:
    """Waits for its order as one task, and ends `web` when nothing is left to do or time is up."""

    def __init__(
        self,
        web: uvicorn.Server,
        application: Application,
        engines: list[EngineClient],
        doors: Doors,
        delay: float,
        drain: float,
    ) -> None:
        """Serves requests for `delay` seconds after the order to stop; they then have `drain` seconds to end."""
        self._web = web
        self._doors = doors
        self._application = application
        self._engines = engines
        self._stopping = False
        self._delay = delay
        self._drain = drain
        self._task: asyncio.Task[None] | None = None
        self._arriving: set[asyncio.Task[None]] = set()

    def obey(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handles signals as orders from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGQUIT, self.retire)

    def stop(self) -> None:
        """Stops the process, also one that was retiring."""
        if not self._stopping:
            self._stopping = True
            for engine in self._engines:
                engine.draining = True
            self._begin(self._stop())

    def retire(self) -> None:
        if self._task is None:
            self._begin(self._retire())

    def _begin(self, departure: Any) -> None:
        if self._task is not None:
            self._task.cancel()
        self._application.leaving = True
        self._task = asyncio.get_running_loop().create_task(departure)

    async def _stop(self) -> None:
        # Without a supervisor the scheduler was ordered to end as well, and nothing more comes.
        delay, drain = (0.0, 0.0) if liveness.orphaned() else (self._delay, self._drain)
        await asyncio.sleep(delay)
        began = time.monotonic()
        for engine in self._engines:
            engine.end_all_in(drain)
        await self._while_clients_come(began, began + min(OPEN_SECONDS, drain))
        await self._stop_accepting()
        await self._until_quiet(QUIET_SECONDS, max(began, self._application.asked_at), began + drain)
        self._web.should_exit = True

    async def _retire(self) -> None:
        await self._stop_accepting()
        await asyncio.sleep(QUIET_SECONDS)  # clients on slow lines have their TLS handshake, too
        await self._until_quiet(max(QUIET_SECONDS, self._drain), time.monotonic(), float("inf"))
        self._web.should_exit = True

    async def _while_clients_come(self, began: float, deadline: float) -> None:
        """Waits until no request has come for a while. Probes do not count.

        Ends at once when no connection is left and no request has come since the order.
        """
        state = self._web.server_state
        application = self._application
        while time.monotonic() < min(deadline, max(began, application.asked_at) + QUIET_SECONDS):
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            if not state.connections and application.asked_at < began:
                return

    async def _stop_accepting(self) -> None:
        """Stops accepting in this process; other processes with the socket go on."""
        while not self._web.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        sockets = [door.dup() for server in self._web.servers for door in server.sockets]
        for server in self._web.servers:
            server.close()
        async with self._doors.closing() as is_last:
            if is_last and self._stopping:
                await self._end_queues(sockets)
            for connection in (connection for door in sockets for connection in accept_waiting(door)):
                self._application.asked_at = time.monotonic()
                self._arriving.add(asyncio.create_task(self._set_up(connection)))
        if self._arriving:
            await asyncio.wait(self._arriving, timeout=QUIET_SECONDS)
        if self._web.config.ssl is not None:
            await asyncio.sleep(_HANDSHAKE_SECONDS)

    async def _end_queues(self, sockets: list[socket.socket]) -> None:
        """Lets no new connection into the listen queues, which the kernel breaks when they are closed."""
        with contextlib.suppress(OSError):  # a kernel without filters: what comes in the last moment is broken
            for door in sockets:
                ignore_new(door)
        await asyncio.sleep(_SECONDS_FOR_HANDSHAKES)

    async def _set_up(self, connection: socket.socket) -> None:
        """Sets up an accepted connection, as uvicorn does."""
        web = self._web
        with contextlib.suppress(OSError):  # the client has gone, or cannot agree on TLS
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: HttpProtocol(web.config, web.server_state, web.lifespan.state), connection, ssl=web.config.ssl
            )

    async def _until_quiet(self, seconds: float, busy: float, deadline: float) -> None:
        """Waits until no connection is left, or none has had a request for `seconds`; the last one came at `busy`."""
        state = self._web.server_state
        while (now := time.monotonic()) < deadline:
            if state.tasks:
                busy = now
            if now >= busy + seconds:
                return
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            if not state.connections:
                return
