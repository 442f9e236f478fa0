"""Questions to the scheduler with one answer each: operators' orders and actions on sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from interfaces import OrderAnswer, SessionAnswer

SECONDS_TO_ANSWER = 10.0


class Questions:
    """The open questions. `send` returns whether a message could be sent."""

    def __init__(self, send: Callable[[Any], bool]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._last = 0

    async def ask(self, message: Callable[[int], Any]) -> Any:
        """Sends the message made for a fresh number and returns its answer. TimeoutError when none comes."""
        self._last += 1
        number = self._last
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            if not self._send(message(number)):
                raise TimeoutError("the scheduler does not read its messages")
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                return await answer
        finally:
            del self._open[number]

    def answered(self, message: OrderAnswer | SessionAnswer) -> None:
        waiting = self._open.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
