"""`python -m benchmarks.images --url URL`: pictures asked about over OpenAI's chat, on any server that takes them.

V1: a picture of 448 pixels with 32 letters, 64 tokens out, 8 requests in flight, each with its own picture.
V2: one picture asked about 16 times, after each other; a server that keeps features encodes it once.
V3: the gaps between the tokens of running streams, before and while a large picture is encoded for another request.

Knows shapes of load and the chat's form. It does not start servers: give it the address of ours, of `transformers
serve` or of llama-server.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import statistics
import string
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np
import orjson
from PIL import Image

from benchmarks.figures import show

ENCODED = "tokenyard_encoded_images_total"
TIMEOUT_S = 600.0
# After this time a server's counters have what its workers did: each tells it about once a second.
COUNTED_S = 2.5


@dataclass(frozen=True)
class Work:
    """Requests about pictures. `large` is the side of the picture that V3 sends beside its streams."""

    name: str
    requests: int
    in_flight: int
    output_tokens: int
    side: int = 448
    letters: int = 32
    same_picture: bool = False
    large: int = 0


WORKS = {
    work.name: work
    for work in (
        Work("V1", 32, 8, 64),
        Work("V2", 16, 1, 64, same_picture=True),
        Work("V3", 4, 4, 400, large=2000),
    )
}


@dataclass
class Stream:
    """Times of one request: when it was sent, and when its tokens came."""

    sent: float
    tokens: list[float] = field(default_factory=list)


class Chat:
    """The chat of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, plain_body: bool = False) -> None:
        """`plain_body` leaves out what only some servers know."""
        self._session = session
        self._url = url.rstrip("/")
        self._model = model
        self._others = {} if plain_body else {"ignore_eos": True}

    async def ask(self, picture: bytes | None, text: str, tokens: int, stream: Stream) -> None:
        """Ask about a picture, and note when tokens come. Raises ValueError when the server refuses."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if picture is not None:
            url = f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
            parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            **self._others,
        }
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"{self._url} answered {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {") and _has_text(orjson.loads(line[6:])):
                    stream.tokens.append(time.perf_counter())

    async def encoded(self) -> float | None:
        """Pictures that the server's workers have encoded; None if it does not tell."""
        await asyncio.sleep(COUNTED_S)
        try:
            async with self._session.get(f"{self._url}/metrics") as response:
                lines = (await response.text()).splitlines() if response.status == 200 else []
        except aiohttp.ClientError:
            return None
        found = [float(line.split()[-1]) for line in lines if line.startswith((f"{ENCODED} ", f"{ENCODED}{{"))]
        return sum(found) if found else None


def _has_text(event: dict[str, Any]) -> bool:
    deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
    return any(delta.get("content") or delta.get("reasoning_content") for delta in deltas)


def picture(seed: int, side: int) -> bytes:
    """A JPEG of blocks of colour. Equal seeds give equal bytes."""
    blocks = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(blocks).resize((side, side), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def question(seed: int, letters: int) -> str:
    drawn = np.random.default_rng(seed).integers(0, len(string.ascii_letters), letters)
    return "".join(string.ascii_letters[i] for i in drawn)


async def measured(chat: Chat, work: Work, seed: int) -> dict[str, float]:
    """The figures of one piece of work."""
    if work.large:
        return await _beside_encoding(chat, work, seed)
    pictures = [picture(seed if work.same_picture else seed + i, work.side) for i in range(work.requests)]
    before = await chat.encoded()
    streams: list[Stream] = []
    waiting = iter(range(work.requests))
    began = time.perf_counter()

    async def user() -> None:
        for i in waiting:
            stream = Stream(time.perf_counter())
            streams.append(stream)
            await chat.ask(pictures[i], question(seed + i, work.letters), work.output_tokens, stream)

    async with asyncio.TaskGroup() as group:
        for _ in range(work.in_flight):
            group.create_task(user())
    seconds = time.perf_counter() - began
    first = [stream.tokens[0] - stream.sent for stream in streams if stream.tokens]
    figures = {
        "tokens a second": sum(len(stream.tokens) for stream in streams) / seconds,
        "first token p50, ms": 1000 * statistics.median(first) if first else float("nan"),
    }
    after = await chat.encoded()
    return figures if before is None or after is None else figures | {"pictures encoded": after - before}


async def _beside_encoding(chat: Chat, work: Work, seed: int) -> dict[str, float]:
    """Gaps of running streams before and while a large picture is read and encoded."""
    streams = [Stream(time.perf_counter()) for _ in range(work.requests)]
    large = picture(seed + 1000, work.large)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(chat.ask(None, question(seed + i, work.letters), work.output_tokens, stream))
            for i, stream in enumerate(streams)
        ]
        while not all(len(stream.tokens) > work.output_tokens // 4 for stream in streams):
            if all(task.done() for task in tasks):
                break
            await asyncio.sleep(0.01)
        begun = time.perf_counter()
        asked = Stream(begun)
        await chat.ask(large, question(seed, work.letters), 1, asked)
        ended = time.perf_counter()
    alone = _gaps(streams, 0.0, begun)
    beside = _gaps(streams, begun, ended)
    if not alone or not beside:
        raise ValueError("the streams ended before the picture was encoded: take a smaller one, or longer streams")
    usual = statistics.median(alone)
    return {
        "seconds to the picture's answer": ended - begun,
        "median gap before, ms": 1000 * usual,
        "p99 gap beside, ms": 1000 * float(np.percentile(beside, 99)),
        "p99 beside over median before": float(np.percentile(beside, 99)) / usual,
    }


def _gaps(streams: Sequence[Stream], start: float, end: float) -> list[float]:
    """Seconds between tokens that came one after the other within a time."""
    return [
        after - before
        for stream in streams
        for before, after in zip(stream.tokens[1:], stream.tokens[2:], strict=False)
        if start <= before and after <= end
    ]


def chosen(names: str, short: bool) -> list[Work]:
    """The works of a list; all of them for an empty one. Raises ValueError."""
    wanted = [name.strip().upper() for name in names.split(",") if name.strip()] or list(WORKS)
    if unknown := sorted(set(wanted) - set(WORKS)):
        raise ValueError(f"work must be a list of {', '.join(WORKS)}, got {', '.join(unknown)}")
    works = [WORKS[name] for name in wanted]
    if not short:
        return works
    return [
        replace(work, requests=min(4, work.requests), side=56, output_tokens=work.output_tokens // 4, letters=8)
        for work in works
    ]


async def run(
    url: str, model: str, works: Sequence[Work], seed: int = 1, plain_body: bool = False
) -> dict[str, dict[str, float]]:
    """The figures of each work, one after the other, after a request that warms up."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    # Some servers close connections at will, and a request's body is large.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        chat = Chat(session, url, model, plain_body)
        await chat.ask(picture(0, works[0].side), "a", 4, Stream(0.0))
        # Every work has pictures of its own.
        return {work.name: await measured(chat, work, seed + 10_000 * i) for i, work in enumerate(works)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.images", description=__doc__)
    add = parser.add_argument
    add("--url", required=True, help="address of a server that takes pictures over OpenAI's chat")
    add("--model", default="", help="the model's name there; ours needs none")
    add("--plain-body", action="store_true", help="no ignore_eos, which transformers serve does not know")
    add("--work", default="", help="a list of V1, V2 and V3; default: all")
    add("--short", action="store_true", help="small pictures and few requests: a test of this program")
    add("--seed", type=int, default=1, help="other seeds have other pictures and questions")
    add("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    try:
        works = chosen(options.work, options.short)
        figures = asyncio.run(run(options.url, options.model, works, options.seed, options.plain_body))
    except (ValueError, aiohttp.ClientError, ExceptionGroup) as error:
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        print(f"images: {cause}", file=sys.stderr)
        return 1
    show(figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
