"""Images that clients send to be painted anew, read by the media process with its limits on pixels, time and memory.

Knows the owner of the process. The media process knows how images are read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed, invalid
from api_server.media.client import MediaClient, ProcessLost
from api_server.media.protocol import Answer, jobs_at_once, unpacked
from interfaces import Segments, mapped

# Most images that are being read or wait for it, and the most bytes of their files.
MOST_WAITING = 64
MOST_WAITING_BYTES = 256 << 20
# Attempts at an image. The process may have died of something else.
_ATTEMPTS = 2
# Names of segments that go with a job: the image's, and its mask's.
_NAMES = 2


@dataclass(frozen=True, eq=False)
class Original:
    """An image in a size, u8[height, width * 3], and its mask, u8[height, width], 255 where it is painted anew."""

    pixels: NDArray[np.uint8]
    mask: NDArray[np.uint8] | None


@dataclass
class Originals:
    """The images of one API process that are painted anew."""

    client: MediaClient
    segments: Segments | None
    _waiting: int = 0
    _waiting_bytes: int = 0
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(jobs_at_once()))
    # The loop itself holds tasks weakly.
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def size(self, picture: bytes, name: str) -> tuple[int, int]:
        """Width and height of an image, from its header. Raises RequestFailed that names the part."""
        answer = await self._ask(picture, b"", 0, 0, (name, ""))
        width, height = answer[0]["size"]
        return width, height

    async def read(
        self, picture: bytes, mask: bytes | None, width: int, height: int, names: tuple[str, str]
    ) -> Original:
        """Reads an image and its mask in a size. Raises RequestFailed that names the part, by one of `names`."""
        _, arrays = await self._ask(picture, mask or b"", width, height, names)
        return Original(arrays["picture"], arrays.get("mask"))

    async def _ask(
        self, picture: bytes, mask: bytes, width: int, height: int, names: tuple[str, str]
    ) -> tuple[Answer, dict[str, NDArray[np.uint8]]]:
        size = len(picture) + len(mask)
        if self._waiting >= MOST_WAITING or (self._waiting and self._waiting_bytes + size > MOST_WAITING_BYTES):
            message = f"{self._waiting} images wait to be read; retry later"
            raise RequestFailed(ErrorKind.OVERLOADED, message, retry_after=RETRY_AFTER_SECONDS)
        job = {"picture": picture, "mask": mask, "width": width, "height": height}
        sent = asyncio.Event()
        task = asyncio.create_task(self._read(job, sent, names))
        self._waiting += 1
        self._waiting_bytes += size
        self._tasks.add(task)
        task.add_done_callback(partial(self._leave, size))
        try:
            # Shielded: the media process fills the segments of what it was sent, which are freed after that.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not sent.is_set():
                task.cancel()
            raise

    def _leave(self, size: int, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._waiting -= 1
        self._waiting_bytes -= size
        if not task.cancelled():
            task.exception()  # marks it as retrieved: perhaps no waiter is left

    async def _read(
        self, job: dict[str, Any], sent: asyncio.Event, fields: tuple[str, str]
    ) -> tuple[Answer, dict[str, NDArray[np.uint8]]]:
        async with self._slots:
            sent.set()
            for _ in range(_ATTEMPTS):
                names = [] if self.segments is None else [self.segments.reserve() for _ in range(_NAMES)]
                try:
                    answer = await self.client.ask(job | {"segments": names})
                    if "error" in answer:
                        part = fields[1 if answer.get("index") else 0]
                        raise invalid(f"{part}: the image {answer['error']}", part)
                    # What is mapped stays readable when its segment has been removed.
                    return answer, {name: mapped(unpacked(array)) for name, array in answer.get("arrays", {}).items()}
                except ProcessLost:
                    continue
                finally:
                    if self.segments is not None:
                        self.segments.free(names)
        message = "the process that reads images has died; retry"
        raise RequestFailed(ErrorKind.UNAVAILABLE, message, retry_after=RETRY_AFTER_SECONDS)
