"""A steady stream of texts through kills: the vector of each one arrives, and is the one from before the kills."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from numpy.typing import NDArray

from tests.chaos.waves import percentiles, shared_memory
from tests.system.pooling_models import make_embedder
from tests.system.server import Server

# More requests than arrive while a process is replaced.
FLAGS = ["--dtype", "float32", "--max-queued", "20000"]
RATE = 200
KILLS = ("model_worker", "scheduler", "model_worker", "model_worker", "scheduler")
# Seconds before the first kill and after each: a process that dies early five times in a row is given up.
BETWEEN_KILLS = 6.0
REQUEST_SECONDS = 120.0
TOLERANCE = 2e-5
"""Batches have other neighbours each time, so the last bits of sums may differ."""
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "hello", "world", "how", "are", "you")
_LONGEST_WORDS = 60
_DISTINCT = 200


@dataclass
class Stream:
    """What became of the texts that were sent."""

    sent: int = 0
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.lost and not self.changed


def texts(options: argparse.Namespace) -> dict[str, object]:
    """Embeddings by the clock while the worker and the scheduler are killed by turns."""
    memory = shared_memory()
    folder: Path = options.folder
    with Server(make_embedder(folder / "embedder"), FLAGS, folder / "texts.log") as server:
        found = asyncio.run(stream(server, RATE, KILLS, BETWEEN_KILLS, options.random))
    leaked = sorted(name for name in shared_memory() - memory if not psutil.pid_exists(int(name.split("-")[2])))
    return {
        "passed": found.clean and len(found.killed) == len(KILLS) and not leaked,
        "killed": found.killed,
        "texts": found.sent,
        "texts a second": RATE,
        "lost": len(found.lost),
        "changed": len(found.changed),
        "examples": [*found.lost[:5], *found.changed[:5]],
        "time to a vector p50 and p99, s": [round(value, 3) for value in percentiles(found.seconds)],
        "shared memory left": leaked,
    }


async def stream(server: Server, rate: float, kills: Sequence[str], pause: float, randomness: random.Random) -> Stream:
    """Send texts by the clock, and kill these processes one after the other, with a pause before and after each."""
    found = Stream()
    chosen = [" ".join(randomness.choices(_WORDS, k=randomness.randint(1, _LONGEST_WORDS))) for _ in range(_DISTINCT)]
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        expected = [await _vector(session, server, text) for text in chosen]
        striking = asyncio.create_task(_strike(server, kills, pause, found))
        asked: list[asyncio.Task[None]] = []
        began = time.monotonic()
        while not striking.done():
            place = randomness.randrange(_DISTINCT)
            asked.append(asyncio.create_task(_ask(session, server, chosen[place], expected[place], found)))
            await asyncio.sleep(max(0.0, began + len(asked) / rate - time.monotonic()))
        await striking
        await asyncio.gather(*asked)
    found.sent = len(asked)
    return found


async def _strike(server: Server, kills: Sequence[str], pause: float, found: Stream) -> None:
    await asyncio.sleep(pause)
    for module in kills:
        await asyncio.to_thread(_kill, server, module)
        found.killed.append(module)
        await asyncio.sleep(pause)


def _kill(server: Server, module: str) -> None:
    """Kill a process. The one before it may not have its successor yet."""

    def killed() -> bool:
        with contextlib.suppress(IndexError, psutil.Error):
            server.child(module).kill()
            return True
        return False

    server.wait_for(f"the start of {module}", 30, killed)


async def _ask(
    session: aiohttp.ClientSession, server: Server, text: str, expected: NDArray[np.float32], found: Stream
) -> None:
    began = time.monotonic()
    try:
        vector = await _vector(session, server, text)
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        found.lost.append(repr(error))
        return
    found.seconds.append(time.monotonic() - began)
    if vector.shape != expected.shape or np.abs(vector - expected).max() > TOLERANCE:
        found.changed.append(text)


async def _vector(session: aiohttp.ClientSession, server: Server, text: str) -> NDArray[np.float32]:
    """Return the vector of a text. ValueError for another answer."""
    async with session.post(f"{server.url}/v1/embeddings", json={"input": text}) as response:
        if response.status != 200:
            raise ValueError(f"{response.status} {(await response.text())[:200]}")
        return np.array((await response.json())["data"][0]["embedding"], np.float32)
