"""Streams whose first event is waited for, so that an error before it has a status of its own.

Knows events as bytes; knows neither routes nor what the events say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from api_server.generation.generation import SILENCE_BEFORE_HEADERS


async def begun(events: AsyncIterator[bytes], close: Callable[[], None]) -> AsyncIterator[bytes]:
    """The events, with the first one at hand unless it takes long. Calls `close` and raises what comes instead."""
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait([first], timeout=SILENCE_BEFORE_HEADERS)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        close()
        raise
    return _joined(first, events)


async def _joined(first: Awaitable[bytes], others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield await first
    async for event in others:
        yield event
