"""Images on their way from an API process to a worker, with the real scheduler process between real sockets."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from api_server.engine.client import EngineClient
from api_server.engine.submission import Submission
from interfaces import (
    ImageMetadata,
    Join,
    SamplingParams,
    SharedMemoryArray,
    Step,
    StepResult,
    TextAndVisionContext,
    WorkerHello,
    decode,
    encode,
)
from interfaces.wire.shared_memory import DIRECTORY, PREFIX, SharedMemoryError
from shared.endpoints import RunDirectory
from shared.settings import Settings
from shared.sockets import connect_dealer

IMAGE = 9
BLOCK_SIZE = 4


@dataclass
class SeeingWorker:
    """A worker on the real socket that opens every image it is given, and samples how many it saw."""

    run_directory: RunDirectory
    epoch: int = 0
    seen: list[tuple[Any, NDArray[Any]]] = field(default_factory=list)
    """What stood in the message, and the pixels."""
    gone: list[Any] = field(default_factory=list)
    """What stood in the message when its segment was there no more: its request had ended."""
    joins: list[Join] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        # What the scheduler watches, and ends if it thinks that this worker hangs: never the process of the tests.
        self._watched = subprocess.Popen(["sleep", "600"])
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._watched.kill()
        self._watched.wait()

    def _run(self) -> None:
        hello = WorkerHello("test", 0, self.epoch, self._watched.pid, 64, BLOCK_SIZE, 8, 100, 50, "", "", "")
        context: zmq.Context[Any] = zmq.Context()
        socket = connect_dealer(context, self.run_directory.worker_endpoint, f"worker:{self.epoch}".encode())
        while not self._stop.is_set():
            socket.send(encode(hello))
            while not self._stop.is_set() and socket.poll(200):
                step = decode(socket.recv(), ipc_peer=True)
                assert isinstance(step, Step)
                for join in step.joins:
                    self.joins.append(join)
                    for image in join.images:
                        try:
                            self.seen.append((image.pixel_values, image.pixels))
                        except SharedMemoryError:
                            self.gone.append(image.pixel_values)
                while self.hold.is_set() and not self._stop.is_set():
                    time.sleep(0.01)
                tokens = np.full(len(step.rows), len(self.seen), np.int32)
                result = StepResult(
                    step.incarnation, self.epoch, 0, step.step, step.rows, tokens, None, {}, device_us=1
                )
                socket.send(encode(result))
        context.destroy(linger=0)


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.settings_file.write_text(Settings().to_json())
    return directory


@pytest.fixture
def scheduler(run_directory: RunDirectory) -> Iterator[int]:
    """Pid of the real process."""
    command = [sys.executable, "-m", "scheduler", "--run-dir", str(run_directory.path)]
    with subprocess.Popen(command) as process:
        yield process.pid
        process.terminate()


def segments() -> set[str]:
    """Those of this process: other servers of this machine have some, too."""
    return {path.name for path in DIRECTORY.glob(f"{PREFIX}*-{os.getpid()}-*")}


def seeing(*images: NDArray[np.float32], tokens: int = 3) -> TextAndVisionContext:
    prompt = [IMAGE if i % 3 else 1 for i in range(3 * len(images) + 1)]
    return TextAndVisionContext.from_prompt(
        prompt,
        SamplingParams(max_new_tokens=tokens),
        vision_token_ids=[IMAGE],
        images=[
            ImageMetadata(start_idx=3 * i + 1, end_idx=3 * i + 3, pixel_values=image) for i, image in enumerate(images)
        ],
    )


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def tokens_of(submission: Submission) -> list[int]:
    async with asyncio.timeout(60):
        while not submission.context.is_done:
            await submission.inbox.next()
    return [int(token) for token in submission.context.tokens.all[submission.context.prompt_length :]]


async def test_images_reach_the_worker_without_passing_through_the_scheduler(
    run_directory: RunDirectory, scheduler: int
) -> None:
    before, rng = segments(), np.random.default_rng()
    pictures = [rng.random((3, 1024, 1024), np.float32) for _ in range(3)]
    icon = rng.random((3, 8, 8), np.float32)
    worker = SeeingWorker(run_directory)
    client = EngineClient(run_directory.api_endpoint, "test")
    client.start()
    try:
        await until(lambda: client.health().ready)
        worker.hold.set()
        memory = resident(scheduler)
        first = client.submit(seeing(*pictures[:2], icon))
        await until(lambda: len(worker.seen) == 3)
        assert f"{DIRECTORY / PREFIX}" not in maps(scheduler)
        assert resident(scheduler) - memory < pictures[0].nbytes // 2
        for (_, pixels), sent in zip(worker.seen, [*pictures[:2], icon], strict=True):
            np.testing.assert_array_equal(pixels, sent)
        shared = {value.name for value, _ in worker.seen if isinstance(value, SharedMemoryArray)}
        assert shared == segments() - before
        assert len(shared) == 2, "the icon travels inline"

        # A worker of the next epoch reads them again.
        worker.close()
        worker = SeeingWorker(run_directory, epoch=1)
        assert await tokens_of(first) == [3, 3, 3]
        assert {value.name for value, _ in worker.seen if isinstance(value, SharedMemoryArray)} == shared
        assert segments() == before

        # What was cancelled is gone, and its neighbour is served.
        worker.hold.set()
        unwanted = seeing(pictures[2], tokens=50)
        cancelled, other = client.submit(unwanted), client.submit(seeing(pictures[0]))
        picture = unwanted.images[0].pixel_values
        client.cancel([cancelled])
        worker.hold.clear()
        assert len(await tokens_of(other)) == 3
        assert segments() == before
        assert worker.gone in ([], [picture]), "the worker may come too late for what was cancelled, for nothing else"
    finally:
        client.close()
        worker.close()


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
