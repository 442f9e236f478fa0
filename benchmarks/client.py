"""The load itself: a fixed number of requests in flight, each sent when the one before it has ended (a closed loop).

Speaks /v1/completions with token-id prompts, streaming, temperature 0 and ignore_eos, so that every server does the
same work. Knows HTTP and the clock. It does not know what the numbers mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import orjson

from benchmarks.timeline import COMPLETED, Timeline
from benchmarks.workload import PlannedRequest

LONGEST_LINE = 1 << 20

Finished = Callable[[Timeline], None]


class StreamError(Exception):
    """A stream that started with 200 and did not end as it must; the text is the outcome."""


class Client:
    """One server, one model, over one pool of connections."""

    def __init__(self, url: str, model: str, request_timeout: float, api_key: str | None = None) -> None:
        self._url, self._model = url.rstrip("/"), model
        self._timeout = aiohttp.ClientTimeout(total=request_timeout)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def run(
        self, planned: Sequence[PlannedRequest], concurrency: int, time_limit: float, finished: Finished
    ) -> list[Timeline]:
        """The time lines of all requests that were sent within the limit; those cut off by it are "not finished"."""
        waiting, timelines = iter(planned), list[Timeline]()
        async with self._session(concurrency) as session:

            async def keep_one_in_flight() -> None:
                for request in waiting:
                    timelines.append(Timeline(sent=time.perf_counter()))
                    await self._send(session, request, timelines[-1])
                    finished(timelines[-1])

            users = [asyncio.create_task(keep_one_in_flight()) for _ in range(concurrency)]
            done, late = await asyncio.wait(users, timeout=time_limit)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            for task in done:
                task.result()
        return timelines

    def _session(self, concurrency: int) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=concurrency)
        return aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, headers=self._headers, read_bufsize=LONGEST_LINE
        )

    async def _send(self, session: aiohttp.ClientSession, request: PlannedRequest, timeline: Timeline) -> None:
        try:
            async with session.post(f"{self._url}/v1/completions", json=self._body(request)) as response:
                if response.status != 200:
                    raise StreamError(f"HTTP {response.status}")
                await _read(response, timeline)
            timeline.outcome = COMPLETED
        except StreamError as error:
            timeline.outcome = str(error)
        except TimeoutError:
            timeline.outcome = "timed out"
        except (aiohttp.ClientError, ValueError) as error:
            timeline.outcome = type(error).__name__
        finally:
            timeline.ended = time.perf_counter()

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def _read(response: aiohttp.ClientResponse, timeline: Timeline) -> None:
    usage: dict[str, Any] | None = None
    async for arrived, event in _events(response):
        if "error" in event:
            raise StreamError("error in stream")
        if any(choice.get("text") for choice in event.get("choices") or ()):
            timeline.chunks.append(arrived)
        usage = event.get("usage") or usage
    if usage is None:
        raise StreamError("no usage in stream")
    timeline.prompt_tokens, timeline.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Arrival time and content of each event up to [DONE]; reads on to the last byte, because E2EL ends there."""
    ended = False
    async for line in response.content:
        arrived = time.perf_counter()
        if not line.startswith(b"data:") or ended:
            continue
        data = line[5:].strip()
        ended = data == b"[DONE]"
        if not ended:
            yield arrived, orjson.loads(data)
    if not ended:
        raise StreamError("stream ended without [DONE]")
