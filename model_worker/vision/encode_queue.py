"""Encodes the images of rows that have joined, in a thread of its own, while steps go on.

Inside of a step an image would make all other rows wait for it. One image is encoded at a time, that of the oldest row
first. All methods but the thread's own are for the thread that runs the steps; features go from one to the other
through a queue, and a socket wakes the receiver.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from model_worker.vision.cores import EncoderCores
from model_worker.vision.encoder import FeatureKey, Features
from model_worker.vision.rows import ImageRow, ImageRows
from model_worker.wake_up import WakeUp
from shared.niceness import go_behind

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
    # That its images took so far.
    seconds: float = 0.0


class _Job(NamedTuple):
    row: ImageRow
    number: int


class _Done(NamedTuple):
    job: _Job
    # Neither features nor an error: a part of the image is encoded, or its row has gone.
    features: Features | None
    error: Exception | None
    # 0 for features of an equal image, which had just been encoded.
    seconds: float


class EncodeQueue:
    """The images that wait to be encoded, and the rows that became ready since they were last asked for."""

    def __init__(self, images: ImageRows, cores: EncoderCores) -> None:
        """The thread takes `cores` before it encodes an image, and gives them back afterwards."""
        self._images = images
        self._cores = cores
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._done: deque[_Done] = deque()
        self._ready: list[ReadyRow] = []
        self._waiting: list[ImageRow] = []
        # Rows whose adapter is still being read, each with the number of its tokens that need no computing.
        self._deferred: list[tuple[ImageRow, int]] = []
        self._thread: Thread | None = None
        # For the encoding thread alone: features that are somewhere still, by what they are kept by. An equal image
        # may come before those of the one before it were taken.
        self._known: WeakValueDictionary[FeatureKey, Features] = WeakValueDictionary()
        self._wake_up = WakeUp()
        # Images encoded, and the seconds that they took.
        self.encoded = 0
        self.seconds = 0.0
        images.encode_later = self.add
        images.fail_later = self.fail
        images.encoder.adapters.came = self._wake_up.wake

    @property
    def hits(self) -> int:
        """Images whose features were kept from an earlier one."""
        return self._images.cache.hits

    def step_began(self) -> None:
        """A step runs from now on, which needs cores."""
        self._cores.step_began()

    def steps_ended(self) -> None:
        """No step runs any more."""
        self._cores.steps_ended()

    def fileno(self) -> int:
        """Becomes readable when `take` has something."""
        return self._wake_up.fileno()

    def add(self, row: ImageRow, start: int) -> None:
        """Have the images of a row encoded, but for those that end before token `start`."""
        adapters = self._images.encoder.adapters
        if not adapters.knows(row.adapter):
            self._deferred.append((row, start))
            return
        row.content = adapters.content(row.adapter)
        cache = self._images.cache
        missing = []
        for index, image in enumerate(row.images):
            if image.end_idx <= start:
                continue
            features = cache.get(self._images.key(row, index))
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
        self._wake_up.wake()

    def take(self) -> list[ReadyRow]:
        """The rows that became ready, or failed, since the last call. Raises what the encoder did not expect."""
        self._wake_up.clear()
        while self._done:
            self._finish(self._done.popleft())
        deferred = self._deferred
        self._deferred = []
        for row, start in deferred:
            if self._images.has(row):
                try:
                    self.add(row, start)
                except ValueError as error:
                    self._ready.append(ReadyRow(row.row, row.joined, 0, str(error)))
        ready = [row for row in self._ready if self._images.runs(row.row, row.joined)]
        self._ready = []
        self._waiting = [row for row in self._waiting if row.missing and self._images.has(row)]
        return ready

    def _finish(self, done: _Done) -> None:
        if done.features is None and done.error is None:
            # The scheduler counts the time of what is encoded from the last word of it on.
            if done.job.row.missing and self._images.has(done.job.row):
                self._tell(done.job.row)
            return
        if done.features is None:
            if self._images.has(done.job.row):
                if done.error is not None and not isinstance(done.error, ValueError):
                    raise done.error
                done.job.row.missing = []
                self._ready.append(ReadyRow(done.job.row.row, done.job.row.joined, 0, str(done.error)))
            return
        if done.seconds:
            self.encoded += 1
            self.seconds += done.seconds
            done.job.row.seconds += done.seconds
        else:
            self._images.cache.hits += 1
        self._give(done.job.row, done.job.number, done.features)
        key = self._images.key(done.job.row, done.job.number)
        if key is None:
            return
        for row in self._waiting:
            for index in list(row.missing):
                if self._images.key(row, index) == key:
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
        self._ready.append(ReadyRow(row.row, row.joined, upto, seconds=row.seconds))
        self._wake_up.wake()

    def _encode_all(self) -> None:
        # Steps go first.
        go_behind(NICENESS)
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
            key = self._images.key(job.row, job.number)
            kept = None if key is None else self._known.get(key)
            done = self._encoded(job) if kept is None else _Done(job, kept, None, 0.0)
            if key is not None and done.features is not None:
                self._known[key] = done.features
            self._done.append(done)
            self._wake_up.wake()

    def _goes_on(self, job: _Job) -> bool:
        """Say that a part of an image is encoded. Whether the others are needed still."""
        self._done.append(_Done(job, None, None, 0.0))
        self._wake_up.wake()
        return job.number in job.row.missing and self._images.has(job.row)

    def _encoded(self, job: _Job) -> _Done:
        """Encode an image, on the cores that images have."""
        started = time.monotonic()
        features = None
        error: Exception | None = None
        self._cores.take()
        try:
            image = job.row.images[job.number]
            encoder = self._images.encoder
            features = encoder.encoded(image, job.row.adapter, job.row.content, lambda: self._goes_on(job))
        except Exception as caught:  # raised by `take`, in the thread that runs the steps
            error = caught
        finally:
            self._cores.give_back()
        return _Done(job, features, error, max(time.monotonic() - started, 1e-9))
