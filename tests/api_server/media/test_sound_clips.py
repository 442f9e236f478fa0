"""Clips of an API process: what was sent is read to its end and stays booked, and features have a limit."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from api_server.errors import ErrorKind, RequestFailed
from api_server.media import clips
from api_server.media.client import MediaClient
from api_server.media.clips import Clips
from api_server.media.protocol import Answer, packed
from interfaces import Segments
from interfaces.wire.shared_memory import DIRECTORY
from shared.recogniser_files import MelForm

FORM = MelForm(8, frames=1000)
FEATURES = np.arange(8 * 4000, dtype=np.float32).reshape(8, 4000)


class SlowClient(MediaClient):
    """A media process that answers, and fills its segment, when a test lets it."""

    def __init__(self) -> None:
        super().__init__({"model": "", "mel": {}})
        self.jobs: list[dict[str, Any]] = []
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def ask(self, job: dict[str, Any]) -> Answer:
        self.jobs.append(job)
        self.begun.set()
        await self.goes_on.wait()
        return {"arrays": {"features": packed(FEATURES, job["segments"])}, "seconds": 40.0}


def reader(client: MediaClient, segments: Segments | None = None) -> Clips:
    return Clips(FORM, client, segments, b"key", most_bytes=1 << 20, most_seconds=40.0)


async def settled(found: Clips, files: int = 0, size: int = 0) -> None:
    """Waits until so many files are read or wait for it."""
    async with asyncio.timeout(60):
        while found.waiting != (files, size):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def released() -> None:
    """Lets the loop forget results that it has handed over, and run what their end has called."""
    for _ in range(5):
        await asyncio.sleep(0)
        gc.collect()


async def test_a_file_whose_client_has_left_leaves_no_segment_and_stays_booked_until_it_is_read() -> None:
    client = SlowClient()
    segments = Segments()
    found = reader(client, segments)
    request = asyncio.create_task(found.read(b"12345", "file"))
    await client.begun.wait()
    names = client.jobs[0]["segments"]
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert found.waiting == (1, 5)
    assert found.feature_bytes > 0
    client.goes_on.set()
    await settled(found)
    assert len(segments) == 0
    assert len(names) == 1
    assert not (DIRECTORY / names[0]).exists()
    await released()
    assert found.feature_bytes == 0


async def test_a_file_that_waits_for_its_turn_goes_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "jobs_at_once", lambda: 1)
    client = SlowClient()
    found = reader(client)
    first = asyncio.create_task(found.read(b"1", "file"))
    await client.begun.wait()
    second = asyncio.create_task(found.read(b"22", "file"))
    await settled(found, 2, 3)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await settled(found, 1, 1)
    client.goes_on.set()
    clip = await first
    np.testing.assert_array_equal(clip.features, FEATURES)
    await settled(found)
    assert len(client.jobs) == 1


async def test_features_of_open_transcriptions_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "MOST_FEATURE_BYTES", 2 * FEATURES.nbytes)
    client = SlowClient()
    client.goes_on.set()
    found = reader(client)
    held = [await found.read(b"1", "file")]
    assert found.feature_bytes == FEATURES.nbytes
    with pytest.raises(RequestFailed, match="sound of open requests takes") as caught:
        await found.read(b"2", "file")
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after
    assert len(client.jobs) == 1
    held.clear()
    await released()
    assert found.feature_bytes == 0
    await found.read(b"3", "file")


async def test_what_a_transcription_holds_counts_as_its_features_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "MOST_FEATURE_BYTES", 2 * FEATURES.nbytes)
    client = SlowClient()
    client.goes_on.set()
    found = reader(client)
    clip = await found.read(b"1", "file")
    with found.holding(FEATURES.nbytes):
        assert found.feature_bytes == 2 * clip.features.nbytes
        with pytest.raises(RequestFailed, match="sound of open requests takes") as caught, found.holding(1):
            pytest.fail("one byte too many was given")
        assert caught.value.kind is ErrorKind.OVERLOADED
    assert found.feature_bytes == clip.features.nbytes
