"""How an API process leaves its clients: whoever has reached it is served, and told to connect anew the next time.

It is either stopped (SIGTERM, SIGINT: the whole server ends) or retired (SIGQUIT: another process accepts from the same
queue). In both cases answers say `Connection: close` from then on, and kept connections live on for a while, since a
request may be on its way on any of them. Knows uvicorn's connections; does not know what is asked on them.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import uvicorn

from api_server.app import Application
from api_server.engine.client import EngineClient
from shared import liveness

SECONDS_FOR_LAST_FRAMES = 3
"""After the drain: the requests that were ended tell their clients so."""
QUIET_SECONDS = 2.0
"""Without a request on any connection; then those that are left are closed, and the process ends. Load balancers that
ask every second have noticed by then."""
_SECONDS_BETWEEN_LOOKS = 0.05


class Leaving:
    """Waits for its order as one task, and ends `web` when nothing is left to do or time is up."""

    def __init__(
        self, web: uvicorn.Server, application: Application, engine: EngineClient, delay: float, drain: float
    ) -> None:
        """After the order to stop, requests are served for `delay` seconds more, and then have `drain` to end."""
        self._web = web
        self._application = application
        self._engine = engine
        self._delay, self._drain = delay, drain
        self._task: asyncio.Task[None] | None = None

    def obey(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on signals are orders."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGQUIT, self.retire)

    def stop(self) -> None:
        """Also of one that was retiring."""
        if not self._engine.draining:
            self._engine.draining = True
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
        # Without a supervisor the scheduler was told to end as well, and nothing more comes.
        delay, drain = (0.0, 0.0) if liveness.orphaned() else (self._delay, self._drain)
        await asyncio.sleep(delay)
        await self._close_door()
        self._engine.end_all_in(drain)
        await self._until_quiet(QUIET_SECONDS, time.monotonic() + drain)
        self._web.should_exit = True

    async def _retire(self) -> None:
        await self._close_door()
        await asyncio.sleep(QUIET_SECONDS)  # a TLS handshake that has begun is no connection yet
        await self._until_quiet(max(QUIET_SECONDS, self._drain), float("inf"))
        self._web.should_exit = True

    async def _close_door(self) -> None:
        """This process accepts no more; where others have the socket as well, they do."""
        while not self._web.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        for server in self._web.servers:
            server.close()

    async def _until_quiet(self, seconds: float, deadline: float) -> None:
        """Until no connection is left, or none of them has had a request for so long."""
        state = self._web.server_state
        busy = now = time.monotonic()
        while now < min(deadline, busy + seconds):
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            if not state.connections:
                return
            now = time.monotonic()
            if state.tasks:
                busy = now
