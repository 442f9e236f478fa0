"""Notices that a client goes away while its answer is made. Knows ASGI's receive and send, and one task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.types import Message, Receive, Send


class WatchedClient:
    """Cancels the current task when the client closes the connection before the whole response has been sent."""

    def __init__(self, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.gone = False
        self._complete = False
        self._receive = receive
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        self._complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        return self._send(message)

    async def watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._complete:
            self.gone = True
            self.task.cancel()
