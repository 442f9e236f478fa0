"""Clips of speech as features: each is read by the media process, with limits on bytes, seconds and time.

Knows the owner of the arrays. The media process knows how sound is read.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed, invalid
from api_server.media.client import MediaClient, ProcessLost
from api_server.media.protocol import jobs_at_once, unpacked
from interfaces import Segments, SharedMemoryArray
from shared.recogniser_files import MelForm

# Most clips that are being read or wait for it, and their bytes.
MOST_WAITING = 64
MOST_WAITING_BYTES = 512 << 20
# Most bytes of features: of transcriptions that run or wait, and of files that are read.
MOST_FEATURE_BYTES = 2 << 30
# Attempts at a clip. The process may have died of something else.
_ATTEMPTS = 2


@dataclass(frozen=True, eq=False)
class Clip:
    """The features [bins, frames] of a sound, at least a window long, and its length in seconds."""

    features: NDArray[np.float32]
    seconds: float
    # Names the content to the prefix cache.
    digest: bytes

    def window(self, first: int, frames: int) -> tuple[NDArray[np.float32], int]:
        """The features of a window that begins at a frame, with zeros behind the end, and a hash of 63 bits."""
        part = self.features[:, first : first + frames]
        filled = np.zeros((len(part), frames), np.float32)
        filled[:, : part.shape[1]] = part
        named = blake2b(self.digest + first.to_bytes(8, "little"), digest_size=8).digest()
        return filled, int.from_bytes(named, "little") >> 1


@dataclass
class _Reading:
    """A file that is read or waits for it. The media process has what `is_sent`."""

    data: bytes
    name: str
    is_sent: bool = False


@dataclass
class Clips:
    """The clips of one API process. `key` makes digests such that no client can search for two of one digest.

    `observe` is called for each clip with its seconds, and the seconds of its reading.
    """

    form: MelForm
    client: MediaClient
    segments: Segments | None
    key: bytes
    most_bytes: int
    most_seconds: float
    observe: Callable[[float, float], None] = lambda seconds, took: None
    _waiting: int = 0
    _waiting_bytes: int = 0
    _feature_bytes: int = 0
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(jobs_at_once()))
    # The loop itself holds tasks weakly.
    _tasks: set[asyncio.Task[Clip]] = field(default_factory=set)

    @property
    def waiting(self) -> tuple[int, int]:
        """The number of files that are read or wait for it, and their bytes."""
        return self._waiting, self._waiting_bytes

    @property
    def feature_bytes(self) -> int:
        """The bytes that transcriptions hold, and that may come of files that are read."""
        return self._feature_bytes

    async def read(self, data: bytes, name: str) -> Clip:
        """Reads a sound file, which the client calls `name`. Raises RequestFailed that names the field."""
        if len(data) > self.most_bytes:
            raise invalid(
                f"{name} has {len(data)} bytes; at most {self.most_bytes} are possible: send it compressed or in parts",
                name,
            )
        if self._waiting >= MOST_WAITING or self._waiting_bytes + len(data) > MOST_WAITING_BYTES:
            raise _overloaded(f"{self._waiting} sound files wait to be read; retry later")
        self._check_features()
        began = time.monotonic()
        reading = _Reading(data, name)
        task = asyncio.create_task(self._read(reading))
        self._tasks.add(task)
        self._waiting += 1
        self._waiting_bytes += len(data)
        task.add_done_callback(lambda task: self._leave(reading, task))
        try:
            # Shielded: the media process reads to the end what it was sent, and fills its segment.
            clip = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not reading.is_sent:
                task.cancel()
            raise
        self.observe(clip.seconds, time.monotonic() - began)
        return clip

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Counts so many bytes that a transcription holds beside its features. Raises RequestFailed."""
        if size and self._feature_bytes + size > MOST_FEATURE_BYTES:
            raise _overloaded(f"sound of open requests takes {self._feature_bytes >> 20} MiB of memory; retry later")
        self._feature_bytes += size
        try:
            yield
        finally:
            self._feature_bytes -= size

    def _leave(self, reading: _Reading, task: asyncio.Task[Clip]) -> None:
        self._tasks.discard(task)
        self._waiting -= 1
        self._waiting_bytes -= len(reading.data)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: perhaps no waiter is left

    async def _read(self, reading: _Reading) -> Clip:
        digest = await asyncio.to_thread(
            lambda: blake2b(reading.data, key=self.key, digest_size=16, person=b"tokenyard clip").digest()
        )
        async with self._slots:
            self._check_features()
            reading.is_sent = True
            kept = 0
            self._feature_bytes += self._largest
            try:
                clip = await self._ask(reading, digest)
                kept = clip.features.nbytes
                loop = asyncio.get_running_loop()
                weakref.finalize(clip, _later, loop, self._release, kept)
                return clip
            finally:
                self._feature_bytes -= self._largest - kept

    @property
    def _largest(self) -> int:
        """Bytes of the features of the longest file."""
        frames = math.ceil(self.most_seconds * self.form.rate / self.form.hop) + 1
        return 4 * self.form.bins * max(self.form.frames, frames)

    def _check_features(self) -> None:
        if self._feature_bytes and self._feature_bytes + self._largest > MOST_FEATURE_BYTES:
            raise _overloaded(f"sound of open requests takes {self._feature_bytes >> 20} MiB of memory; retry later")

    def _release(self, size: int) -> None:
        self._feature_bytes -= size

    async def _ask(self, reading: _Reading, digest: bytes) -> Clip:
        for _ in range(_ATTEMPTS):
            names = [] if self.segments is None else [self.segments.reserve()]
            try:
                job: dict[str, Any] = {"sound": reading.data, "most_seconds": self.most_seconds, "segments": names}
                answer = await self.client.ask(job)
                if "error" in answer:
                    raise invalid(f"{reading.name}: the sound file {answer['error']}", reading.name)
                features = unpacked(answer["arrays"]["features"])
                # What is mapped stays readable when its segment has been removed.
                found = features.open() if isinstance(features, SharedMemoryArray) else features
                return Clip(found, answer["seconds"], digest)
            except ProcessLost:
                continue
            finally:
                if self.segments is not None:
                    self.segments.free(names)
        message = "the process that reads sound files has died; retry"
        raise RequestFailed(ErrorKind.UNAVAILABLE, message, retry_after=RETRY_AFTER_SECONDS)


def _overloaded(message: str) -> RequestFailed:
    return RequestFailed(ErrorKind.OVERLOADED, message, retry_after=RETRY_AFTER_SECONDS)


def _later(loop: asyncio.AbstractEventLoop, release: Callable[[int], None], size: int) -> None:
    """Releases on the loop's thread, which is the only one that counts."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(release, size)
