"""Questions to the scheduler with one answer each: orders of operators, of adapters and of weights, and of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from typing import Any

from interfaces import (
    AdapterAnswer,
    AdapterOrder,
    Decision,
    DecisionsAnswer,
    DecisionsInquiry,
    Inquiry,
    InquiryAnswer,
    LoRARequest,
    Order,
    OrderAnswer,
    SessionAnswer,
    SessionOrder,
    Status,
    WeightsAnswer,
    WeightsOrder,
)

SECONDS_TO_ANSWER = 10.0
# A large adapter from a slow disk takes a while, and those before it are loaded first.
SECONDS_TO_LOAD = 300.0
# Running requests may be waited for first.
SECONDS_TO_CHANGE = 1800.0


Answer = OrderAnswer | SessionAnswer | AdapterAnswer | WeightsAnswer | DecisionsAnswer


def status_after(status: Status | None, answer: Answer) -> Status | None:
    """Return the status with what an answer says of it: the next request comes perhaps before the next Status."""
    if status is None:
        return None
    if isinstance(answer, AdapterAnswer):
        # That request may name the adapter.
        return changed(status, adapters=answer.adapters)
    if isinstance(answer, WeightsAnswer):
        # Its answer names the version.
        return changed(status, weights=changed(status.weights, name=answer.version))
    return status


class NotSent(TimeoutError):
    """A question that did not leave this process."""


class Questions:
    """The open questions. `send` returns whether a message could be sent."""

    def __init__(self, send: Callable[[Any], bool]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        # Answers to inquiries have no number: one is open at a time.
        self._inquiring = asyncio.Lock()
        self._decisions: asyncio.Future[list[str]] | None = None
        self._inquired = ""

    async def order(self, action: int, request_ids: Sequence[str] = ()) -> OrderAnswer:
        """Sends an operator's order (`Action`). Its updates for this replica are handled before its answer.

        TimeoutError when the scheduler does not answer.
        """
        answer: OrderAnswer = await self._ask(
            lambda number: Order(number, action, list(request_ids)), SECONDS_TO_ANSWER
        )
        return answer

    async def session(self, action: int, session: str, **fields: Any) -> SessionAnswer:
        """Sends an action on a session (`SessionAction`). TimeoutError when the scheduler does not answer."""
        answer: SessionAnswer = await self._ask(
            lambda number: SessionOrder(number, action, session, **fields), SECONDS_TO_ANSWER
        )
        return answer

    async def adapter(self, request: LoRARequest, pinned: bool = False, replace: bool = False) -> AdapterAnswer:
        """Sends an operator's order about an adapter. TimeoutError when the scheduler does not answer."""
        answer: AdapterAnswer = await self._ask(
            lambda number: AdapterOrder(number, request, pinned, replace), SECONDS_TO_LOAD
        )
        return answer

    async def weights(self, action: int, **fields: Any) -> WeightsAnswer:
        """Sends an order about weights (`WeightsAction`). TimeoutError when the scheduler does not answer."""
        answer: WeightsAnswer = await self._ask(
            lambda number: WeightsOrder(number, action, **fields), SECONDS_TO_CHANGE
        )
        return answer

    async def recall(self, request_ids: Sequence[str]) -> list[Decision]:
        """Asks for the decisions about requests with these ids. TimeoutError when the scheduler is silent."""
        answer: DecisionsAnswer = await self._ask(
            lambda number: DecisionsInquiry(number, list(request_ids)), SECONDS_TO_ANSWER
        )
        return answer.decisions

    async def decisions(self, request_id: str) -> list[str]:
        """Asks for the decision log of the requests whose id begins so. TimeoutError when the scheduler is silent."""
        async with self._inquiring:
            self._decisions = asyncio.get_running_loop().create_future()
            self._inquired = request_id
            try:
                if not self._send(Inquiry(request_id)):
                    raise NotSent("the scheduler does not read its messages")
                async with asyncio.timeout(SECONDS_TO_ANSWER):
                    return await self._decisions
            finally:
                self._decisions = None

    def inquiry_answered(self, message: InquiryAnswer) -> None:
        """Takes the answer to the open inquiry; one that came too late is about other requests."""
        waiting = self._decisions
        fits = all(line.startswith(self._inquired) for line in message.lines)
        if waiting is not None and not waiting.done() and fits:
            waiting.set_result(message.lines)

    async def _ask(self, message: Callable[[int], Any], seconds: float) -> Any:
        """Sends the message made for a fresh number and returns its answer. TimeoutError when none comes."""
        self._last += 1
        number = self._last
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            if not self._send(message(number)):
                raise NotSent("the scheduler does not read its messages")
            async with asyncio.timeout(seconds):
                return await answer
        finally:
            del self._open[number]

    def give_up(self, why: str) -> None:
        """Fails the open questions: nothing will answer them."""
        for waiting in (*self._open.values(), self._decisions):
            if waiting is not None and not waiting.done():
                waiting.set_exception(TimeoutError(why))

    def answered(self, message: Answer) -> None:
        waiting = self._open.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
