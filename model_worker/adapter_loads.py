"""Reads adapters in a thread of its own, while steps go on, and frees them.

Inside of a step an adapter would make all rows wait for its files. One is read at a time, in the order of the
scheduler's messages. All methods but the thread's own are for the thread that runs the steps; results go from one to
the other through a queue, and a socket wakes the receiver. Knows handles, paths and digests. Does not know what an
adapter consists of.
"""

from __future__ import annotations

import logging
from collections import deque
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple, Protocol

import torch

from interfaces import AdapterFailed, AdapterLoaded, DropAdapter, LoadAdapter
from model_worker.backends.base import AdapterFacts
from model_worker.cuda.memory import is_for_want_of_memory
from model_worker.wake_up import WakeUp
from shared.resources import free_memory

log = logging.getLogger(__name__)

# Share of free memory for adapters. A GPU's free memory is what the KV cache has left, where none was kept for them.
_CPU_SHARE = 1 / 16
_CUDA_SHARE = 1 / 4


def default_adapter_memory(device: torch.device) -> int:
    """Return the bytes for adapters when the user names none. Call it after the KV cache is made."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE)
    return int(free_memory() * _CPU_SHARE)


class Adaptable(Protocol):
    """What takes adapters: a backend, or a model of the one-shot tasks. The methods are as `Backend` has them."""

    def load_adapter(self, handle: int, path: str) -> AdapterFacts: ...

    def drop_adapter(self, handle: int) -> None: ...


class _Done(NamedTuple):
    order: LoadAdapter
    facts: AdapterFacts | None
    error: Exception | None
    backend: Adaptable


class AdapterLoads:
    """The adapters of a backend, which may take `memory` bytes together."""

    def __init__(self, backend: Adaptable, epoch: int, index: int, memory: int) -> None:
        """`epoch` and `index` are the worker's."""
        self._backend = backend
        self._epoch = epoch
        self._index = index
        self.memory = memory
        self._orders: SimpleQueue[LoadAdapter] = SimpleQueue()
        self._done: deque[_Done] = deque()
        # Wanted by the scheduler of this incarnation, read or not.
        self._wanted: dict[int, LoadAdapter] = {}
        self._loaded: set[int] = set()
        self._incarnation: int | None = None
        self._thread: Thread | None = None
        # Orders that came while the backend had no weights, and whether it has none.
        self._put_off: list[LoadAdapter] = []
        self._holding = False
        # Held while an adapter is read: the backend and its weights do not change meanwhile.
        self._lock = Lock()
        self._wake_up = WakeUp()

    def fileno(self) -> int:
        """Becomes readable when `take` has something."""
        return self._wake_up.fileno()

    def obey(self, message: LoadAdapter | DropAdapter) -> None:
        """Begin to load an adapter, or free one. No pass is in flight."""
        if message.incarnation != self._incarnation:
            # A new scheduler knows nothing of the adapters of the old one.
            self.forget()
            self._incarnation = message.incarnation
        if isinstance(message, DropAdapter):
            self._drop(message.handle)
            return
        self._wanted[message.handle] = message
        if self._thread is None:
            self._thread = Thread(target=self._read_all, name="adapters", daemon=True)
            self._thread.start()
        self._orders.put(message)

    def forget(self) -> None:
        """Free all adapters: a new scheduler and a new registration begin without any. No pass is in flight."""
        for handle in list(self._wanted):
            self._drop(handle)

    def hold(self) -> None:
        """Read no adapter until `move_to`: the backend's weights go away, and no adapter can be compared with them."""
        with self._lock:
            self._holding = True

    def move_to(self, backend: Adaptable) -> None:
        """Read the adapters again for another backend, which computes the next steps. No pass is in flight.

        One that cannot be read any more fails: `take` says so.
        """
        with self._lock:
            self._backend = backend
            self._holding = False
            for order in self._put_off:
                self._orders.put(order)
            self._put_off.clear()
            for handle in sorted(self._loaded):
                order = self._wanted[handle]
                self._loaded.discard(handle)
                self._done.append(self._read(order))
        if self._done:
            self._wake_up.wake()

    def take(self) -> list[AdapterLoaded | AdapterFailed]:
        """The answers to orders that were carried out since the last call."""
        self._wake_up.clear()
        answers = []
        while self._done:
            done = self._done.popleft()
            if done.backend is not self._backend:
                # It was read for weights that are not used any more.
                if self._wanted.get(done.order.handle) is done.order and done.order.handle not in self._loaded:
                    self._orders.put(done.order)
            elif self._wanted.get(done.order.handle) is done.order:
                answers.append(self._answer(done))
            elif done.order.handle not in self._wanted:
                # What failed may have left something. A later order for the same handle replaces it.
                self._backend.drop_adapter(done.order.handle)
        return answers

    def _answer(self, done: _Done) -> AdapterLoaded | AdapterFailed:
        order = done.order
        facts = done.facts
        whose = order.incarnation, self._epoch, self._index, order.handle
        if facts is None:
            del self._wanted[order.handle]
            # An earlier order for the same handle may have been carried out.
            self._backend.drop_adapter(order.handle)
            return AdapterFailed(*whose, "", _reason(done), isinstance(done.error, FileNotFoundError))
        problem = ""
        if order.digest and facts.digest != order.digest:
            problem = f"the files in {order.path} have another content than before"
        elif facts.size > self.memory:
            problem = f"it takes {facts.size} bytes, and adapters may take {self.memory}: raise lora_memory"
        if problem:
            del self._wanted[order.handle]
            self._backend.drop_adapter(order.handle)
            return AdapterFailed(*whose, facts.digest, problem)
        self._loaded.add(order.handle)
        return AdapterLoaded(*whose, facts.digest, facts.rank, facts.size)

    def _drop(self, handle: int) -> None:
        """Free an adapter, or forget one that is not read yet: `take` frees that."""
        if self._wanted.pop(handle, None) is not None and handle in self._loaded:
            self._loaded.remove(handle)
            self._backend.drop_adapter(handle)

    def _read_all(self) -> None:
        # The cores are for steps.
        torch.set_num_threads(1)
        while True:
            order = self._orders.get()
            with self._lock:
                if self._holding:
                    self._put_off.append(order)
                    continue
                self._done.append(self._read(order))
            self._wake_up.wake()

    def _read(self, order: LoadAdapter) -> _Done:
        """Read an adapter, if it is still wanted."""
        if self._wanted.get(order.handle) is not order:
            return _Done(order, None, None, self._backend)
        try:
            return _Done(order, self._backend.load_adapter(order.handle, order.path), None, self._backend)
        except Exception as caught:  # the adapter fails, and not the worker
            if is_for_want_of_memory(caught):
                # This error has no frames, which would hold what was read of the adapter.
                return _Done(order, None, MemoryError(_no_memory(caught)), self._backend)
            return _Done(order, None, caught, self._backend)


def _no_memory(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return (
        "the GPU has no memory left for it: unload another adapter, or start the server with more lora_memory and "
        f"kv_memory auto, or with less kv_memory ({first})"
    )


def _reason(done: _Done) -> str:
    """Why an adapter could not be read, in words."""
    error = done.error
    if isinstance(error, ValueError | OSError | NotImplementedError | MemoryError):
        return str(error) or type(error).__name__
    log.error("adapter %s could not be read by an error of ours", done.order.path, exc_info=error)
    return f"the model worker's log has the reason ({type(error).__name__})"
