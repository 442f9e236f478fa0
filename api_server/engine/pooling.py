"""One-shot requests in the scheduler's hands: the values of their texts, which arrive in parts and in any order.

Knows texts by their index and values as they arrive. Knows no socket.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from api_server.engine.open_request import OpenRequest
from api_server.errors import ErrorKind, RequestFailed, from_scheduler
from interfaces import (
    ErrorCode,
    GenerationStatus,
    PooledValues,
    PoolingContext,
    RequestError,
    RequestID,
    SchedulingOptions,
    Segments,
    SharedMemoryError,
    Submit,
    Vectors,
)


class _Part(NamedTuple):
    """Values, and the index of the text that each belongs to."""

    texts: NDArray[np.int64]
    values: PooledValues


class PooledSubmission(OpenRequest):
    """One one-shot request, from `EngineClient.pool` to the values of its last text.

    Only texts without values are submitted again.
    """

    __slots__ = ("_context", "_missing", "_parts", "_sent", "done")

    def __init__(
        self, handle: int, context: PoolingContext, scheduling: SchedulingOptions, again: bool = False
    ) -> None:
        super().__init__(handle, scheduling)
        self.again = again
        # The values of all texts, or RequestFailed.
        self.done: asyncio.Future[PooledValues] = asyncio.get_running_loop().create_future()
        self._context = context
        self._parts: list[_Part] = []
        self._missing = np.ones(len(context), bool)
        # The indices of the texts in the last message.
        self._sent: NDArray[np.int64] = np.arange(len(context))

    @property
    def request_id(self) -> RequestID:
        return self._context.request_id

    @property
    def message(self) -> Submit:
        context = self._context
        if self._parts:
            self._sent = np.flatnonzero(self._missing)
            context = context.select(self._sent)
        return Submit(self.handle, context, self.scheduling, self.again)

    @property
    def progress(self) -> int:
        return len(self._missing) - int(self._missing.sum())

    def receive(self, vectors: Vectors) -> bool:
        """Adds values of texts of the last message. True when no text is missing any more.

        ValueError when there are no such texts, or their values are of another width than those before, or when a
        segment is gone.
        """
        if vectors.preview:
            return self._preview(vectors)
        first = vectors.first
        values = vectors.values.take()
        self.queued = vectors.queued_us / 1e6
        if first < 0 or not 0 < len(values) <= len(self._sent) - first:
            raise ValueError(f"values of texts {first} to {first + len(values)} of {len(self._sent)} are impossible")
        if self._parts and values.values.shape[1] != self._parts[0].values.values.shape[1]:
            raise ValueError("values of the same request have different widths")
        texts = self._sent[first : first + len(values)]
        if not self._missing[texts].all():
            raise ValueError(f"the values of texts {first} to {first + len(values)} have come before")
        self._missing[texts] = False
        self._parts.append(_Part(texts, values))
        return not self._missing.any()

    def _preview(self, vectors: Vectors) -> bool:
        """Takes a preview of an image. False: nothing is complete with it."""
        vectors.values.discard()
        return False

    def finish(self) -> None:
        """Hands out the values of all texts."""
        if not self.done.done():
            self.done.set_result(_in_order(self._parts))

    def add(self, token: int, logprob: float | None) -> None:
        """One-shot requests have no tokens."""

    def share(self, segments: Segments) -> None:
        self._context.share_arrays(segments)

    def unshare(self, segments: Segments) -> None:
        self._context.unshare_arrays(segments)

    def end(self, status: GenerationStatus) -> None:
        self._fail(RequestFailed(ErrorKind.UNAVAILABLE, "the request was ended by an operator"))

    def fail(self, error: RequestError) -> None:
        self._fail(from_scheduler(error))

    def _fail(self, error: RequestFailed) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class StreamedSubmission(PooledSubmission):
    """A one-shot request whose texts are wanted one after another, each as soon as it is there."""

    __slots__ = ("_arrived", "_found", "_last_preview", "_previews")

    def __init__(
        self, handle: int, context: PoolingContext, scheduling: SchedulingOptions, again: bool = False
    ) -> None:
        super().__init__(handle, context, scheduling, again)
        self._arrived = asyncio.Event()
        # Values of texts that were not handed out.
        self._found: dict[int, NDArray[np.float32]] = {}
        # Previews of the first text that were not handed out, and the number of the last one that has come.
        self._previews: deque[tuple[int, NDArray[np.float32]]] = deque()
        self._last_preview = 0

    async def texts(self) -> AsyncIterator[NDArray[np.float32]]:
        """Hands out the values of each text, f32[rows, width], in the order of the texts. Raises RequestFailed."""
        for i in range(len(self._missing)):
            while i not in self._found:
                if self.done.done():
                    self.done.result()
                self._arrived.clear()
                await self._arrived.wait()
            yield self._found.pop(i)

    async def with_previews(self) -> AsyncIterator[tuple[int, NDArray[np.float32]]]:
        """Hands out the previews of the only text by number, from 1 on, and at last its values as number 0. Raises
        RequestFailed."""
        while 0 not in self._found:
            while self._previews:
                yield self._previews.popleft()
            if self.done.done():
                self.done.result()
            self._arrived.clear()
            if not self._previews and 0 not in self._found:
                await self._arrived.wait()
        while self._previews:
            yield self._previews.popleft()
        yield 0, self._found.pop(0)

    def _preview(self, vectors: Vectors) -> bool:
        try:
            values = vectors.values.take().array
        except SharedMemoryError:
            return False  # it came too late, and the image does without it
        # An image that was lost with its worker has the same previews again.
        if vectors.preview > self._last_preview:
            self._last_preview = vectors.preview
            self._previews.append((vectors.preview, values))
            self._arrived.set()
        return False

    def receive(self, vectors: Vectors) -> bool:
        complete = super().receive(vectors)
        if vectors.preview:
            return complete
        texts, values = self._parts[-1]
        self._found.update(zip(texts.tolist(), values.texts(), strict=True))
        # One part tells that some values have come, and their width; the others would only take memory.
        del self._parts[1:]
        self._arrived.set()
        return complete

    def finish(self) -> None:
        """`texts` hands out what has come."""

    def _fail(self, error: RequestFailed) -> None:
        super()._fail(error)
        self.done.exception()  # marks it as retrieved: perhaps no reader is left
        self._arrived.set()


def _in_order(parts: list[_Part]) -> PooledValues:
    """The values of all parts in the order of their texts."""
    if len(parts) == 1:
        return parts[0].values
    parts.sort(key=lambda part: int(part.texts[0]))
    texts = np.concatenate([part.texts for part in parts])
    joined = PooledValues.joined([part.values for part in parts])
    if (np.diff(texts) > 0).all():
        return joined
    # A text that was submitted again can lie between two that were not.
    order = np.argsort(texts)
    values = joined.texts()
    return PooledValues(np.concatenate([values[i] for i in order]), joined.lengths[order])


def wrong_task(task: str, known: frozenset[str]) -> RequestError | None:
    """Why no worker can do `task`; None when one can, or none has been heard of yet."""
    if not known or task in known:
        return None
    can = ", ".join(sorted(known))
    return RequestError(
        ErrorCode.INVALID, f"this model cannot {task.replace('_', ' ')}: it can {can}; use the routes for that"
    )
