"""Encodes clips of speech in a thread of its own, while steps go on and windows become sound.

Between two steps a clip would hold up every row. One batch is computed at a time, in the order in which they came. All
methods but the thread's own are for the thread that runs the steps; results go from one to the other through a queue,
and a socket wakes the receiver. Knows batches; does not know what a clip is.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import torch

from interfaces import Batch, BatchResult
from model_worker.cpu.threads import ALL_THREADS, ThreadPool
from model_worker.wake_up import WakeUp
from shared.niceness import go_behind

# Of the thread that encodes, and of those that it starts.
NICENESS = 10


class ClipThread:
    """Computes batches by `run`, on `device`: on a CPU with half of the cores, and steps have the others meanwhile."""

    def __init__(self, run: Callable[[Batch], BatchResult], device: torch.device) -> None:
        self._run = run
        self._device = device
        # Each with the registration that it belongs to.
        self._batches: SimpleQueue[tuple[int, Batch]] = SimpleQueue()
        self._done: deque[tuple[int, BatchResult | Exception]] = deque()
        self._registration = 0
        self._thread: Thread | None = None
        self._wake_up = WakeUp()

    def fileno(self) -> int:
        """Becomes readable when `take` has something."""
        return self._wake_up.fileno()

    def add(self, batch: Batch) -> None:
        """Have a batch computed."""
        if self._thread is None:
            self._thread = Thread(target=self._compute_all, name="clips", daemon=True)
            self._thread.start()
        self._batches.put((self._registration, batch))

    def take(self) -> list[BatchResult]:
        """The results since the last call. Raises what the computation did not expect."""
        self._wake_up.clear()
        found: list[BatchResult] = []
        while self._done:
            registration, result = self._done.popleft()
            if isinstance(result, Exception):
                raise result
            if registration == self._registration:
                found.append(result)
        return found

    def forget(self) -> None:
        """Drop all batches: what comes next is for another registration."""
        self._registration += 1

    def _compute_all(self) -> None:
        # Steps go first.
        go_behind(NICENESS)
        # Kernels of one stream run one after another: on that of the steps a clip would hold them up.
        cuda = self._device.type == "cuda"
        own = torch.cuda.stream(torch.cuda.Stream(self._device)) if cuda else contextlib.nullcontext()
        cores = torch.get_num_threads()
        taken = max(1, cores // 2)
        # Codes depend on the number of threads in their last bits, so it is always the same.
        torch.set_num_threads(taken)
        with own:
            while True:
                registration, batch = self._batches.get()
                if registration == self._registration:
                    self._compute(registration, batch, ALL_THREADS if cuda else max(1, cores - taken))

    def _compute(self, registration: int, batch: Batch, left: int) -> None:
        """Compute a batch, while steps have the threads that are `left`."""
        found: BatchResult | Exception
        # A step that loses a core in the middle of a pass takes many times as long.
        ThreadPool.most_threads = left
        try:
            found = self._run(batch)
        except Exception as error:  # raised by `take`, in the thread that runs the steps
            found = error
        finally:
            ThreadPool.most_threads = ALL_THREADS
        self._done.append((registration, found))
        self._wake_up.wake()
