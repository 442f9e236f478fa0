"""The API process's end of the media process: what it does when that process dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from functools import partial

import pytest

from api_server.media.client import MediaClient, ProcessLost
from api_server.media.protocol import Start
from shared.recogniser_files import MelForm
from tests.kills import kill_unseen

JOB = {"sound": b"no sound", "most_seconds": 1.0, "segments": []}


@pytest.fixture
async def client() -> AsyncIterator[MediaClient]:
    made = MediaClient(Start(mel=asdict(MelForm(8))))
    yield made
    await made.close()


async def test_after_a_lost_job_another_process_answers(client: MediaClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "error" in await client.ask(JOB)
    for _ in range(2):
        assert client._process is not None
        monkeypatch.setattr(client._process, "wait", partial(_seen_late, client._process.wait))
        kill_unseen(client._process.pid)
        first = asyncio.create_task(client.ask(JOB))
        # The loop has seen that the pipe is broken, and has not seen the end.
        await asyncio.sleep(0.02)
        with pytest.raises(ProcessLost):
            await client.ask(JOB)
        assert "error" in await client.ask(JOB)
        with pytest.raises(ProcessLost):
            await first


async def _seen_late(wait: Callable[[], Awaitable[int]]) -> int:
    await asyncio.sleep(0.3)
    return await wait()
