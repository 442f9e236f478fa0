"""Sends blocks of a KV cache to another worker, and fills blocks with what others send.

The bytes go through the scheduler: in shared memory where all are on one machine, inline to and from another one. A
thread of its own writes and fills, so that steps go on; orders are carried out one after the other. Knows blocks and
tickets. Does not know sequences.
"""

from __future__ import annotations

import hashlib
import logging
import queue
from collections import deque
from dataclasses import dataclass
from threading import Thread

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import Handover, KvPiece, KvTaken, SharedMemoryArray, ShipKv, TakeKv, mapped
from model_worker.device_copy import Mark
from model_worker.kv_cache import KVCache
from model_worker.kv_spill.blocks import Blocks, Copied
from model_worker.wake_up import WakeUp

log = logging.getLogger(__name__)

# Changes with the order of the bytes of a block.
FORM = 1
_NONE = np.empty(0, np.uint8)


@dataclass(slots=True)
class _Out:
    order: ShipKv
    copied: Copied


@dataclass(slots=True)
class _In:
    order: TakeKv
    after: Mark


def kv_form(cache: KVCache, device: torch.device) -> str:
    """Describe in words how the bytes of a block lie: workers with equal forms can use each other's blocks."""
    layers = hashlib.blake2b(repr(cache.layout.layers).encode(), digest_size=8).hexdigest()
    dtype = str(cache.layout.dtype).removeprefix("torch.")
    return f"{FORM} {device.type} {dtype} {cache.block_size} {layers}"


class KvShipper:
    """Sends and takes blocks of one cache. All but `_run` is for the thread that runs steps."""

    def __init__(self, blocks: Blocks, num_blocks: int, form: str, epoch: int, index: int, shares: bool) -> None:
        """`epoch` and `index` are the worker's. `shares`: its scheduler is on this machine."""
        self.form = form
        self.block_bytes = blocks.block_bytes
        self._blocks = blocks
        self._num_blocks = num_blocks
        self._whose = epoch, index
        self._handover = Handover() if shares else None
        self._orders: queue.Queue[_Out | _In] = queue.Queue()
        self._done: deque[KvPiece | KvTaken] = deque()
        self._thread: Thread | None = None
        self._wake_up = WakeUp()

    @property
    def still(self) -> bool:
        """Whether orders are taken only while no step is in flight."""
        return self._blocks.still

    def fileno(self) -> int:
        """Becomes readable when `take` has something."""
        return self._wake_up.fileno()

    def obey(self, order: ShipKv | TakeKv) -> None:
        """Begin to send blocks, or to fill them. What is sent is what the steps before this call leave in them.

        An order that names a block that there is not, or has not the bytes of its blocks, is answered without them.
        """
        if self._thread is None:
            self._thread = Thread(target=self._run, name="kv shipping", daemon=True)
            self._thread.start()
        blocks = order.blocks
        known = len(blocks) > 0 and blocks.min() >= 0 and blocks.max() < self._num_blocks
        if isinstance(order, ShipKv):
            if known:
                self._orders.put(_Out(order, self._blocks.copy_out(blocks)))
            else:
                self._answer(self._piece(order, _NONE))
        elif known and order.data.nbytes == len(blocks) * self.block_bytes:
            self._orders.put(_In(order, self._blocks.mark()))
        else:
            self._answer(self._taken(order, whole=False))

    def take(self) -> list[KvPiece | KvTaken]:
        """The answers to orders that were carried out since the last call."""
        self._wake_up.clear()
        answers = []
        while self._done:
            answers.append(self._done.popleft())
        return answers

    def finish(self) -> None:
        """Wait until all orders are carried out."""
        self._orders.join()

    def forget(self) -> None:
        """Carry out what was ordered, and answer none of it: the next orders are another registration's."""
        self.finish()
        for answer in self.take():
            if isinstance(answer, KvPiece) and isinstance(answer.data, SharedMemoryArray):
                answer.data.unlink()

    # The thread

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            try:
                answer = self._carry_out(order)
            except Exception as error:  # what did not come is computed
                if not isinstance(error, ValueError):  # its maker has removed the segment
                    log.exception("a piece of a KV cache could not be moved by an error of ours")
                failed = order.order
                answer = self._piece(failed, _NONE) if isinstance(failed, ShipKv) else self._taken(failed, whole=False)
            self._answer(answer)
            self._orders.task_done()

    def _carry_out(self, order: _Out | _In) -> KvPiece | KvTaken:
        if isinstance(order, _Out):
            return self._piece(order.order, np.ascontiguousarray(order.copied.wait()).reshape(-1))
        data = order.order.data
        try:
            here = mapped(data).reshape(len(order.order.blocks), -1)
        finally:
            if isinstance(data, SharedMemoryArray):
                data.unlink()
        self._blocks.copy_in(order.order.blocks, here, order.after)
        return self._taken(order.order, whole=True)

    def _piece(self, order: ShipKv, data: NDArray[np.uint8]) -> KvPiece:
        if self._handover is None:
            return KvPiece(order.incarnation, *self._whose, order.ticket, data)
        self._handover.forget_old()
        return KvPiece(order.incarnation, *self._whose, order.ticket, self._handover.give(data))

    def _taken(self, order: TakeKv, whole: bool) -> KvTaken:
        return KvTaken(order.incarnation, *self._whose, order.ticket, whole)

    def _answer(self, answer: KvPiece | KvTaken) -> None:
        self._done.append(answer)
        self._wake_up.wake()
