"""The bodies of the open requests of one process: limits for each and for all, and the thread for large ones.

Knows weights. Knows no JSON and no dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from api_server.body.weight import Weight, exactly
from api_server.errors import ErrorKind, RequestFailed, invalid

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
# Limit of one body. Its values are parsed in about a quarter of a second.
MOST_WEIGHT = 3 * MAX_BODY_BYTES
# Limit of all bodies together.
MOST_HELD = 4 * MOST_WEIGHT
# A further budget for small bodies, so that a few large ones do not keep them out.
KEPT_FOR_SMALL = MOST_WEIGHT
SMALL = 1 << 16
# Weight up to which a body is read on the event loop: it takes a few milliseconds.
LIGHT = 1 << 18


class Bodies:
    """The bodies of all open requests. One per process."""

    def __init__(self) -> None:
        # Weight of all bodies of open requests.
        self.held = 0
        # One thread: bodies that are read at the same time would only take turns, and hold more memory.
        self._pool = ThreadPoolExecutor(1, "bodies")

    def hold(self, counts_values: bool = True) -> Held:
        """Opens the book of a body; without `counts_values` its bytes alone count, as those of a form's file."""
        return Held(self, counts_values)

    async def apart(self, job: Callable[[], T]) -> T:
        """Runs long work in the thread for large bodies."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, job)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Held:
    """The body of one request, from its first byte to the end of the answer."""

    def __init__(self, bodies: Bodies, counts_values: bool) -> None:
        self._bodies = bodies
        self._weight = Weight()
        self._counts_values = counts_values
        self._charged = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._charge(0)

    @property
    def light(self) -> bool:
        """True when the body can be read on the event loop without delaying others."""
        return self._charged <= LIGHT

    def add(self, data: bytes) -> None:
        """Adds bytes of the body. Raises RequestFailed(OVERLOADED) when there is no room for them."""
        if self._counts_values:
            self._weight.add(data)
        else:
            self._weight.size += len(data)
        self._charge(min(self._weight.total, MOST_WEIGHT))  # a heavier body is refused, or proves to be lighter
        limit = MOST_HELD if self._charged > SMALL else MOST_HELD + KEPT_FOR_SMALL
        if self._bodies.held > limit:
            self._charge(0)
            raise RequestFailed(
                ErrorKind.OVERLOADED, "the requests that are open hold as much memory as they may; retry later"
            )

    async def weigh(self, body: bytes | bytearray) -> None:
        """Weighs the complete body. Raises RequestFailed(INVALID) when it has too many values."""
        if self._weight.total <= MOST_WEIGHT:
            return
        weight = await self._bodies.apart(lambda: exactly(body))
        self._charge(weight.total)
        if weight.total > MOST_WEIGHT:
            raise invalid(
                f"the request body has {weight.values} values (items of lists and members of objects) in {weight.size} "
                f"bytes, more than can be read at once: about {MOST_WEIGHT * weight.values // weight.total} of this "
                "kind are possible; send fewer"
            )

    def _charge(self, weight: int) -> None:
        self._bodies.held += weight - self._charged
        self._charged = weight
