"""Encodes the images of rows that have joined, in a thread of its own, while steps go on.

Inside of a step an image would make all other rows wait for it. One image is encoded at a time, that of the oldest row
first. All methods but the thread's own are for the thread that runs the steps; features go from one to the other
through a queue, and a socket wakes the receiver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch

from model_worker.vision.encoder import Features
from model_worker.vision.rows import ImageRow, ImageRows

log = logging.getLogger(__name__)

# Of the thread that encodes, and of those that it starts.
NICENESS = 10
# How far a row may run that waits for no image any more.
ALL_TOKENS = int(np.iinfo(np.int32).max)


class ReadyRow(NamedTuple):
    """A row that may compute its tokens before `upto` now, or the error of its images."""

    row: int
    # Number of the step in which it joined.
    joined: int
    upto: int
    error: str | None = None


class _Job(NamedTuple):
    row: ImageRow
    number: int


class _Done(NamedTuple):
    job: _Job
    features: Features | None
    error: Exception | None
    seconds: float


class EncodeQueue:
    """The images that wait to be encoded, and the rows that became ready since they were last asked for."""

    def __init__(self, images: ImageRows, threads: int, share_cores: Callable[[bool], None] = lambda _: None) -> None:
        """The thread computes with as many cores as `threads`.

        `share_cores` is called in it with True before it encodes an image, so that steps leave it these cores, and with
        False afterwards. A step that loses a core in the middle of a pass, to a thread that computes for long, takes
        many times as long as others.
        """
        self._images = images
        self._threads = threads
        self._share_cores = share_cores
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._done: deque[_Done] = deque()
        self._ready: list[ReadyRow] = []
        self._waiting: list[ImageRow] = []
        self._thread: Thread | None = None
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        # Images encoded, and the seconds that they took.
        self.encoded = 0
        self.seconds = 0.0
        images.encode_later = self.add
        images.fail_later = self.fail

    @property
    def hits(self) -> int:
        """Images whose features were kept from an earlier one."""
        return self._images.cache.hits

    def fileno(self) -> int:
        """Becomes readable when `take` has something."""
        return self._receiver.fileno()

    def add(self, row: ImageRow, start: int) -> None:
        """Have the images of a row encoded, but for those that end before token `start`."""
        cache = self._images.cache
        missing = []
        for index, image in enumerate(row.images):
            if image.end_idx <= start:
                continue
            features = cache.get(image.image_hash)
            if features is None:
                missing.append(index)
            else:
                self._images.put(row, index, features)
        row.missing = missing
        if not missing:
            self._tell(row)
            return
        self._waiting.append(row)
        if self._thread is None:
            self._thread = Thread(target=self._encode_all, name="encoder", daemon=True)
            self._thread.start()
        for index in missing:
            self._jobs.put(_Job(row, index))

    def fail(self, row: ImageRow, text: str) -> None:
        """Report a row whose images cannot be used."""
        self._ready.append(ReadyRow(row.row, row.joined, 0, text))
        self._wake()

    def take(self) -> list[ReadyRow]:
        """The rows that became ready, or failed, since the last call. Raises what the encoder did not expect."""
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(4096)
        while self._done:
            self._finish(self._done.popleft())
        ready = [row for row in self._ready if self._images.runs(row.row, row.joined)]
        self._ready = []
        self._waiting = [row for row in self._waiting if row.missing and self._images.has(row)]
        return ready

    def _finish(self, done: _Done) -> None:
        if done.features is None:
            if self._images.has(done.job.row):
                if done.error is not None and not isinstance(done.error, ValueError):
                    raise done.error
                done.job.row.missing = []
                self._ready.append(ReadyRow(done.job.row.row, done.job.row.joined, 0, str(done.error)))
            return
        self.encoded += 1
        self.seconds += done.seconds
        self._give(done.job.row, done.job.number, done.features)
        image_hash = done.job.row.images[done.job.number].image_hash
        if image_hash is None:
            return
        for row in self._waiting:
            for index in list(row.missing):
                if row.images[index].image_hash == image_hash:
                    self._give(row, index, done.features)

    def _give(self, row: ImageRow, index: int, features: Features) -> None:
        if index not in row.missing:
            return
        row.missing.remove(index)
        try:
            self._images.put(row, index, features)
        except ValueError as error:
            row.missing = []
            self._ready.append(ReadyRow(row.row, row.joined, 0, str(error)))
            return
        self._tell(row)

    def _tell(self, row: ImageRow) -> None:
        upto = row.images[row.missing[0]].start_idx if row.missing else ALL_TOKENS
        self._ready.append(ReadyRow(row.row, row.joined, upto))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._sender.send(b"\0")

    def _encode_all(self) -> None:
        torch.set_num_threads(self._threads)
        # On Linux a thread has a niceness of its own. Steps go first where cores are few.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        device = self._images.encoder.device
        # Kernels of one stream run one after another: on that of the steps an image would hold them up.
        own = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()
        with own:
            self._encode_jobs()

    def _encode_jobs(self) -> None:
        while True:
            job = self._jobs.get()
            if job.number not in job.row.missing or not self._images.has(job.row):
                continue
            started = time.monotonic()
            features = None
            error: Exception | None = None
            self._share_cores(True)
            try:
                features = self._images.encoder.encode(job.row.images[job.number])
            except Exception as caught:  # raised by `take`, in the thread that runs the steps
                error = caught
            finally:
                self._share_cores(False)
            self._done.append(_Done(job, features, error, time.monotonic() - started))
            self._wake()
