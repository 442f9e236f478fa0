"""An `EmbeddingsGenerator` whose texts are computed by the workers of a running server, over its scheduler's socket.

For programs on the server's host that have token ids already. It has its own event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Self

from api_server.engine.client import EngineClient
from api_server.errors import ErrorKind, RequestFailed
from interfaces import EmbeddingsContext, EmbeddingsOutput, PoolingContext, PoolingTask, RequestID, SchedulingOptions
from shared.endpoints import RunDirectory

# Seconds between two looks at whether the server is ready.
_LOOK_SECONDS = 0.02


class SocketEmbeddings:
    """An `EmbeddingsGenerator` over the socket of the scheduler that belongs to a run directory.

    `normalize` gives vectors the length 1, and `dimensions` cuts them before. Use it from several threads at will.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        scheduling: SchedulingOptions | None = None,
    ) -> None:
        self._normalize = normalize
        self._dimensions = dimensions
        self._scheduling = scheduling
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="embeddings", daemon=True)
        self._thread.start()
        self._client = EngineClient(RunDirectory(run_directory).api_endpoint, "embeddings")
        self._loop.call_soon_threadsafe(self._client.start)

    def wait_until_ready(self, seconds: float = 60.0) -> None:
        """Wait for a worker. RequestFailed gives the reason when none is there in time."""
        asyncio.run_coroutine_threadsafe(self._ready(seconds), self._loop).result()

    def encode(self, batch: Mapping[RequestID, EmbeddingsContext]) -> dict[RequestID, EmbeddingsOutput]:
        """Return the embedding of each request: f32[width]. RequestFailed says why there are none."""
        if not batch:
            return {}
        texts = [context.tokens.all for context in batch.values()]
        context = PoolingContext.of(texts, PoolingTask.EMBED, normalize=self._normalize, dimensions=self._dimensions)
        pooled = asyncio.run_coroutine_threadsafe(self._client.pool(context, self._scheduling), self._loop).result()
        return {name: EmbeddingsOutput(rows[0]) for name, rows in zip(batch, pooled.texts(), strict=True)}

    def close(self) -> None:
        """Leave the server. Calls of other threads end with CancelledError. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _leave(self) -> None:
        """End the calls of other threads (they get CancelledError), then leave."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._client.close()

    async def _ready(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not self._client.health().ready:  # noqa: ASYNC110 (a look is cheap, and readiness has no event)
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            reason = self._client.health().reason
            raise RequestFailed(ErrorKind.UNAVAILABLE, f"not ready after {seconds:g} s: {reason}") from None
