"""The images of an API process: videos leave room for images, and what no client waits for is not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from api_server.errors import ErrorKind, RequestFailed
from api_server.media import images as images_module
from api_server.media.client import MediaClient
from api_server.media.facts import ImageFacts
from api_server.media.images import Images, ProcessedImage
from api_server.media.processors import Vision
from api_server.media.protocol import Answer, jobs_at_once, packed

START: Any = {"model": "m", "most_tokens": 1, "most_video_tokens": 1}


class Facts(ImageFacts):
    async def read(self) -> Vision:
        return Vision("<i>", "<i>", 1, "<i>", "", "", "f", video_placeholder="<v>", video_token_id=1)


class Client(MediaClient):
    """A media process that answers when the test says so."""

    def __init__(self, floats: int = 10) -> None:
        super().__init__(START)
        self.asked: list[bytes] = []
        self.open = asyncio.Event()
        self.floats = floats

    async def ask(self, job: dict[str, Any]) -> Answer:
        self.asked.append(job["video"][0] if job["video"] else job["image"])
        await self.open.wait()
        return {"run": "r", "arrays": {"pixel_values": packed(np.zeros(self.floats, np.float32), [])}}


def made(client: Client, most_bytes: int = 1 << 20) -> Images:
    return Images(Facts("m"), client, (1, 1), None, most_bytes, b"key")


def names(kind: str, count: int) -> list[bytes]:
    return [f"{kind}{i}".encode() for i in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds and nothing that was due is left to do."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    for _ in range(20):
        await asyncio.sleep(0)


async def settled(
    work: Coroutine[Any, Any, list[ProcessedImage]], condition: Callable[[], bool]
) -> asyncio.Task[list[ProcessedImage]]:
    """A request that has come as far as it can: until the condition holds."""
    task = asyncio.create_task(work)
    await until(condition)
    return task


def waiters(images: Images) -> int:
    return sum(coming.waiters for coming in images._coming.values())


def test_videos_leave_room_for_images() -> None:
    async def run() -> None:
        client = Client()
        images = made(client)
        videos = await settled(images.processed_videos(names("v", 20), []), lambda: waiters(images) == 20)
        assert len(client.asked) == jobs_at_once() - 1
        picture = await settled(images.processed([b"i"], []), lambda: waiters(images) == 21)
        assert client.asked[-1] == b"i"
        client.open.set()
        assert len(await videos) == 20
        assert len(await picture) == 1
        assert len(client.asked) == 21

    asyncio.run(run())


def test_what_no_client_waits_for_is_not_read() -> None:
    async def run() -> None:
        client = Client()
        images = made(client)
        gone = await settled(images.processed_videos(names("v", 20), []), lambda: waiters(images) == 20)
        stays = await settled(images.processed_videos(names("v", 12)[10:], []), lambda: waiters(images) == 22)
        gone.cancel()
        sent = jobs_at_once() - 1
        await until(lambda: len(images._coming) == sent + 2)
        client.open.set()
        assert len(await stays) == 2
        assert sorted(client.asked) == sorted([*names("v", sent), b"v10", b"v11"])
        assert (len(images._coming), images._coming_bytes) == (0, 0)

    asyncio.run(run())


def test_a_video_that_was_dropped_is_read_when_it_comes_again() -> None:
    async def run() -> None:
        client = Client()
        images = made(client)
        first = await settled(images.processed_videos(names("v", 20), []), lambda: waiters(images) == 20)
        first.cancel()
        again = asyncio.create_task(images.processed_videos([b"v19"], []))
        client.open.set()
        assert len(await again) == 1

    asyncio.run(run())


def test_few_videos_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "MOST_VIDEOS_WAITING", 4)

    async def run() -> None:
        client = Client()
        images = made(client)
        images.most_videos = 1
        waiting = await settled(images.processed_videos(names("v", 4), []), lambda: waiters(images) == 4)
        with pytest.raises(RequestFailed, match="4 videos wait to be read") as refused:
            await images.processed_videos([b"another"], [])
        assert refused.value.kind is ErrorKind.OVERLOADED
        client.open.set()
        assert len(await images.processed([b"i"], [])) == 1
        assert len(await waiting) == 4

    asyncio.run(run())


def test_a_refused_request_drops_what_it_had_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "MOST_WAITING", 30)
    monkeypatch.setattr(images_module, "MOST_VIDEOS_WAITING", 40)

    async def run() -> None:
        client = Client()
        images = made(client)
        with pytest.raises(RequestFailed, match="30 images wait to be read"):
            await images.processed_videos(names("v", 31), [])
        assert not images._coming
        assert not client.asked

    asyncio.run(run())


def test_what_would_fill_the_cache_is_not_kept() -> None:
    async def run() -> None:
        client = Client(floats=1000)
        images = made(client, most_bytes=9000)
        client.open.set()
        await images.processed([b"i"], [])
        client.floats = 1500
        await images.processed_videos([b"v"], [])
        assert [image.is_clip for image in images._kept.values()] == [False]

    asyncio.run(run())


class Ears(ImageFacts):
    async def read(self) -> Vision:
        return Vision("<s>", "<s>", 1, "<s>", "", "", "f", is_sound=True, most_sound_bytes=400)


class Sounds(Client):
    """Reads sounds of 100 bytes and 1000 seconds at once."""

    async def ask(self, job: dict[str, Any]) -> Answer:
        return {"run": "r", "seconds": 1000.0, "arrays": {"pixel_values": packed(np.zeros(25, np.float32), [])}}


def test_features_of_sounds_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "MOST_FEATURE_BYTES", 650)

    async def run() -> None:
        images = Images(Ears("m"), Sounds(), (1, 1), None, 0, b"key")
        held = await images.processed_sounds([b"s0"], [])
        held += await images.processed_sounds([b"s1"], [])
        held += await images.processed_sounds([b"s2"], [])
        assert 300 <= images.feature_bytes < 400
        with pytest.raises(RequestFailed, match="sounds of open requests take") as refused:
            await images.processed_sounds([b"s3"], [])
        assert refused.value.kind == ErrorKind.OVERLOADED
        array = held.pop().arrays["pixel_values"]
        held.clear()
        await until(lambda: images.feature_bytes < 200)
        assert images.feature_bytes >= array.nbytes, "what a request holds is counted"
        del array
        await until(lambda: images.feature_bytes == 0)
        assert len(await images.processed_sounds([b"s4"], [])) == 1

    asyncio.run(run())


def test_sounds_of_a_request_have_a_bound_together() -> None:
    async def run() -> None:
        images = Images(Ears("m"), Sounds(), (1, 1), None, 0, b"key")
        assert len(await images.processed_sounds(names("s", 3), [])) == 3
        with pytest.raises(RequestFailed, match=r"sounds\[3\]: the sounds .* take 4000 s; at most 3600 s"):
            await images.processed_sounds(names("s", 5), [])

    asyncio.run(run())
