"""Pauses and resumes generation, and flushes caches, for operators' routes of every dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed, invalid
from api_server.state import ServerState
from interfaces import Action, OrderAnswer

# What becomes of running requests: they end now, end by themselves before the pause, lose their K and V, or keep them.
MODES = ("abort", "wait", "retract", "keep")
# The empty prefix, which every id has.
EVERY_REQUEST = ""
_POLL_SECONDS = 0.05


async def pause(server: ServerState, mode: str) -> None:
    """Lets no step start, with one of MODES for running requests. New requests wait in every mode.

    Raises RequestFailed where the scheduler does not answer, as all these do.
    """
    if mode == "wait":
        await _drain(server)
    await order(server, Action.PAUSE)
    if mode == "abort":
        await order(server, Action.ABORT, [EVERY_REQUEST])
    elif mode == "retract":
        await order(server, Action.RETRACT)


async def _drain(server: ServerState) -> None:
    """Keeps new requests waiting until the running ones have ended.

    The scheduler lets them run again soon after the last order, should the client or this process go away.
    """
    answer = await order(server, Action.DRAIN)
    while answer.requests and not answer.refused:
        await asyncio.sleep(_POLL_SECONDS)
        answer = await order(server, Action.DRAIN_ON)
    if answer.refused:
        raise invalid(f"mode wait: {answer.refused}; pause again if generation is to be paused", "mode")


async def go_on(server: ServerState) -> None:
    """Lets steps start again."""
    await order(server, Action.CONTINUE)


async def flush(server: ServerState) -> str:
    """Drops all cached prefixes. Returns why not, if requests are open."""
    return (await order(server, Action.FLUSH_CACHE)).refused


def is_paused(server: ServerState) -> bool:
    """Whether an operator has paused generation, as far as this process knows."""
    return server.engine.status is not None and server.engine.status.paused


async def order(server: ServerState, action: int, rids: Sequence[str] = ()) -> OrderAnswer:
    """Sends an operator's order to the schedulers of all models. The answer is the first that refuses, or counts."""
    try:
        answers = [await state.engine.questions.order(action, rids) for state in server.models]
    except TimeoutError as error:
        reason = str(error) or "the scheduler does not answer"
        raise RequestFailed(ErrorKind.UNAVAILABLE, reason, retry_after=RETRY_AFTER_SECONDS) from None
    refused = next((answer for answer in answers if answer.refused), None)
    return refused or max(answers, key=lambda answer: answer.requests)
