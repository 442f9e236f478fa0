"""The load itself, over HTTP: a closed loop, or arrivals by the clock.

Speaks /v1/completions with token-id prompts, streaming, temperature 0 and ignore_eos, so that every server does the
same work; a `Form` says where a server cannot be asked so, or is to be asked for chat, for answers in one piece, or for
vectors at /v1/embeddings. Knows HTTP and the clock. It does not know what the numbers mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import string
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from deploy.bench.timeline import COMPLETED, Timeline
from deploy.bench.workload import PlannedRequest

# Bytes that are kept of a refusal.
MOST_DETAIL = 500

Finished = Callable[[Timeline], None]
# Parts of a chat's delta that carry tokens.
_PARTS = ("content", "reasoning_content", "reasoning", "tool_calls")

_Send = Callable[[PlannedRequest], Awaitable[Timeline]]
_User = Callable[[_Send], Awaitable[None]]


class StreamError(Exception):
    """A stream that started with 200 and did not end as it must; the text is the outcome."""


@dataclass(frozen=True)
class Form:
    """What a server takes.

    `text_prompts`: it takes no token ids; it is sent a text of as many letters, which are as many tokens for the
    tokenizer of the standard models. `plain_body`: it refuses ignore_eos and stream_options; tokens are counted as
    chunks unless it sends `usage` unasked, and a reason to finish ends its streams, with or without [DONE].
    `close_connections`: it wants a new connection for each request. `whole`: answers come in one piece, so that their
    time lines have no chunks. `chat`: prompts are texts, sent as a user's message. `ignore_eos`: answers do not end
    before they are as long as planned. `further` fields are in each body. `embeds`: it is asked for the vector of a
    text, which this function makes of a prompt's tokens; `tokens_around` such a text are more tokens.
    """

    text_prompts: bool = False
    plain_body: bool = False
    close_connections: bool = False
    whole: bool = False
    chat: bool = False
    ignore_eos: bool = True
    further: Mapping[str, Any] = field(default_factory=dict)
    embeds: Callable[[Sequence[int]], str] | None = None
    tokens_around: int = 0

    @property
    def path(self) -> str:
        if self.embeds is not None:
            return "/v1/embeddings"
        return "/v1/chat/completions" if self.chat else "/v1/completions"


class Client:
    """One server, one model, over one pool of connections."""

    def __init__(
        self, url: str, model: str, request_timeout: float, api_key: str | None = None, form: Form | None = None
    ) -> None:
        self._url, self._model, self._form = url.rstrip("/"), model, form or Form()
        self._timeout = aiohttp.ClientTimeout(total=request_timeout)
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def run(
        self, planned: Sequence[PlannedRequest], concurrency: int, time_limit: float, finished: Finished
    ) -> list[Timeline]:
        """A closed loop: so many in flight, each sent when the one before it has ended.

        The time lines of all requests that were sent within the limit; those cut off by it are CUT_OFF.
        """
        waiting = iter(planned)

        async def keep_one_in_flight(send: _Send) -> None:
            for request in waiting:
                finished(await send(request))

        return await self._drive([keep_one_in_flight] * concurrency, time_limit)

    async def arrivals(
        self,
        planned: Sequence[PlannedRequest],
        times: Sequence[float],
        time_limit: float,
        finished: Finished = lambda timeline: None,
        concurrency: int | None = None,
    ) -> list[Timeline]:
        """One request at each time, in seconds from now, whether or not those before have ended.

        With `concurrency`, no more than so many are in flight; a request waits here for its place.
        """
        places = asyncio.Semaphore(concurrency or len(planned))

        def after(seconds: float, request: PlannedRequest) -> _User:
            async def user(send: _Send) -> None:
                await asyncio.sleep(seconds)
                async with places:
                    finished(await send(request))

            return user

        users = [after(seconds, request) for seconds, request in zip(times, planned, strict=True)]
        return await self._drive(users, time_limit)

    async def _drive(self, users: Sequence[_User], time_limit: float) -> list[Timeline]:
        timelines = list[Timeline]()
        async with self._session(len(users)) as session:

            async def send(request: PlannedRequest) -> Timeline:
                timelines.append(timeline := Timeline(sent=time.perf_counter()))
                await self._send(session, request, timeline)
                return timeline

            tasks = [asyncio.ensure_future(user(send)) for user in users]
            done, late = await asyncio.wait(tasks, timeout=time_limit)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            for task in done:
                task.result()
        return timelines

    def _session(self, connections: int) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=connections, force_close=self._form.close_connections)
        return aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)

    async def _send(self, session: aiohttp.ClientSession, request: PlannedRequest, timeline: Timeline) -> None:
        embeds = self._form.embeds
        url = self._url + self._form.path
        body = self._body(request) if embeds is None else self._question(embeds(request.prompt))
        try:
            async with session.post(url, data=orjson.dumps(body)) as response:
                if response.status != 200:
                    timeline.detail = (await response.content.read(MOST_DETAIL)).decode(errors="replace")
                    raise StreamError(f"HTTP {response.status}")
                usage: dict[str, Any] | None
                if embeds is not None:
                    usage = self._usage_of_vector(request, await response.json())
                elif self._form.whole:
                    usage = (await response.json()).get("usage")
                else:
                    usage = await _read(response, timeline, marked=not self._form.plain_body)
            self._count(request, timeline, usage)
            timeline.outcome = COMPLETED
        except StreamError as error:
            timeline.outcome = str(error)
        except TimeoutError:
            timeline.outcome = "timed out"
        except (aiohttp.ClientError, ValueError, LookupError) as error:
            timeline.outcome = type(error).__name__
        finally:
            timeline.ended = time.perf_counter()

    def _question(self, text: str) -> dict[str, Any]:
        """As OpenAI's client asks, which wants base64."""
        return {"model": self._model, "input": text, "encoding_format": "base64"}

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        prompt: Any = request.text or (_letters(request.prompt) if self._form.text_prompts else request.prompt)
        body = {
            "model": self._model,
            **({"messages": [{"role": "user", "content": prompt}]} if self._form.chat else {"prompt": prompt}),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": not self._form.whole,
            **self._form.further,
        }
        if self._form.plain_body:
            return body
        body |= {"ignore_eos": True} if self._form.ignore_eos else {}
        return body if self._form.whole else body | {"stream_options": {"include_usage": True}}

    def _count(self, request: PlannedRequest, timeline: Timeline, usage: dict[str, Any] | None) -> None:
        if usage is None and not self._form.plain_body:
            raise StreamError("no usage in answer" if self._form.whole else "no usage in stream")
        usage = usage or {"prompt_tokens": len(request.prompt), "completion_tokens": len(timeline.chunks)}
        timeline.prompt_tokens, timeline.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]

    def _usage_of_vector(self, request: PlannedRequest, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the tokens of an answered text: some servers count letters instead."""
        if len(answer["data"]) != 1 or not answer["data"][0]["embedding"]:
            raise StreamError("no vector in answer")
        return {"prompt_tokens": len(request.prompt) + self._form.tokens_around, "completion_tokens": 0}


def _letters(prompt: Sequence[int]) -> str:
    return "".join(string.ascii_letters[token % len(string.ascii_letters)] for token in prompt)


async def _read(response: aiohttp.ClientResponse, timeline: Timeline, marked: bool) -> dict[str, Any] | None:
    """Puts the arrivals on the time line; returns the last `usage`. A stream that is `marked` ends with [DONE].

    While tokens come it only notes when: whatever it did more would be taken from the cores of the server that it
    measures. What came is looked at when the stream has ended or is cut off.
    """
    arrivals = list[tuple[float, bytes]]()
    try:
        # To the last byte, because E2EL ends there.
        async for part in response.content.iter_any():
            arrivals.append((time.perf_counter(), part))
    except BaseException:
        with contextlib.suppress(ValueError):
            _events(arrivals, timeline)
        raise
    events, ended = _events(arrivals, timeline)
    if any("error" in event for event in events):
        raise StreamError("error in stream")
    finished = any(choice.get("finish_reason") for event in events for choice in event.get("choices") or ())
    if not ended and (marked or not finished):
        raise StreamError("stream ended without [DONE]")
    return next((event["usage"] for event in reversed(events) if event.get("usage")), None)


def _events(arrivals: Sequence[tuple[float, bytes]], timeline: Timeline) -> tuple[list[dict[str, Any]], bool]:
    """The stream's events up to [DONE], and whether that came; those with text are put on the time line.

    ValueError for data that is no JSON.
    """
    events = list[dict[str, Any]]()
    for arrived, data in _data(arrivals):
        if data == b"[DONE]":
            return events, True
        events.append(event := orjson.loads(data))
        if any(map(_has_text, event.get("choices") or ())):
            timeline.chunks.append(arrived)
    return events, False


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a part of a stream carries generated tokens: text, reasoning, or a call."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(name) for name in _PARTS))


def _data(arrivals: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """What follows `data:` on a line, and when the end of that line came, which may have begun in an earlier part."""
    begun = b""
    for arrived, part in arrivals:
        *lines, begun = (begun + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield arrived, line[5:].strip()
