"""Calls that block, in a thread that does not hold the end of the process, unlike those of an executor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

_Result = TypeVar("_Result")


async def daemon_call(call: Callable[[], _Result]) -> _Result:
    """Wait for a call. When the wait is cancelled, the call goes on, until it or the process ends."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Result] = loop.create_future()

    def settle(value: _Result | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(value)  # type: ignore[arg-type]  # it is the call's own
        else:
            answer.set_exception(error)

    def run() -> None:
        try:
            ended = partial(settle, call(), None)
        except Exception as error:
            ended = partial(settle, None, error)
        # The loop may have ended before.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended)

    threading.Thread(target=run, name="traces", daemon=True).start()
    return await answer
