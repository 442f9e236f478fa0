"""Which workers there are: how one joins, and everything that lets go of one that is lost.

Knows indices and epochs. Does not know sockets or processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from interfaces import ErrorCode, RequestError, WorkerHello
from scheduler.adapter_registry import AdapterRegistry
from scheduler.limits import Limits
from scheduler.oneshot_batches import OneShotBatches
from scheduler.open_requests import OpenRequests
from scheduler.rebalancing import Rebalancing
from scheduler.sequence import Sequence
from scheduler.shipping import Shipping
from scheduler.succession import FencedEpochs, same_supervisor
from scheduler.weights_registry import WeightsRegistry
from scheduler.workers import Worker


class Membership:
    """Keeps the workers of `OpenRequests`, and the epochs of those that were given up."""

    def __init__(
        self,
        requests: OpenRequests,
        limits: Limits,
        adapters: AdapterRegistry,
        weights: WeightsRegistry,
        oneshot_batches: OneShotBatches,
        shipping: Shipping,
        rebalancing: Rebalancing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._limits = limits
        self._adapters = adapters
        self._weights = weights
        self._oneshot_batches = oneshot_batches
        self._shipping = shipping
        self._rebalancing = rebalancing
        self._clock = clock
        self._fenced = FencedEpochs()

    def join(self, hello: WorkerHello) -> bool:
        """Register a worker, or update what it says about itself.

        Returns True if it is new or restarted. Then the sequences of its predecessor are back in the queue.
        """
        known = self._requests.workers.get(hello.index)
        if known is not None and known.hello.epoch == hello.epoch:
            known.hello = hello  # some of it changes
        if self.is_fenced(hello) or self.index_is_taken(hello):
            return False
        if known is not None and known.hello.epoch >= hello.epoch:
            return False
        if known is not None:
            self.lose(hello.index, "was followed by its next epoch")
        worker = Worker(hello, *self._limits.of_worker, clock=self._clock)
        self._requests.workers[hello.index] = worker
        self._adapters.worker_joined(worker)
        self._weights.worker_joined(worker)
        self._requests.request_log.record_event(f"{worker.describe()} is here")
        return True

    def is_fenced(self, hello: WorkerHello) -> bool:
        """Whether this worker was given up. Others compute what it had, so it must end."""
        return self._fenced.has(hello.index, hello.epoch)

    def index_is_taken(self, hello: WorkerHello) -> bool:
        """Whether a worker of another supervisor has this index. The new one waits as long as that one lives."""
        known = self._requests.workers.get(hello.index)
        return known is not None and not same_supervisor(known.hello.epoch, hello.epoch)

    def lose(self, index: int, why: str = "died", blamed: bool = True) -> str:
        """Give a worker up. Its sequences wait again, in their old order, with the tokens their clients have.

        If `blamed`, one of the sequences that it was computing may be the reason. Returns the event in one line.
        """
        worker = self._requests.take_worker(index)
        # One that was asked to end may be killed when it takes too long, whatever it computes.
        blamed = blamed and not worker.leaving
        self._fenced.add(index, worker.hello.epoch)
        story = f"{worker.describe()} {why}"
        self._oneshot_batches.lose_worker(worker, story, blamed)
        self._adapters.worker_lost(worker, blamed)
        self._weights.worker_lost(worker, blamed)
        computing = [*worker.in_flight.computing(), *worker.images.encoding()]
        suspects = {sequence.order for sequence in computing} if blamed else set()
        for row in worker.rows.occupied().tolist():
            self._recover(worker.remove(row), story, suspects)
        self._shipping.lose_worker(worker)
        self._rebalancing.lose_worker(worker)
        self._requests.request_log.record_event(story)
        return story

    def _recover(self, sequence: Sequence, story: str, suspects: set[int]) -> None:
        """Put a sequence of a lost worker back into the queue, unless too many workers crashed with it."""
        quarantine = self._requests.quarantine
        self._requests.counters["recovered"] += 1
        if sequence.order in suspects:
            quarantine.record_crash(sequence)
        if quarantine.is_poison(sequence):
            text = f"the model worker crashed {quarantine.crashes(sequence)} times while it computed this request"
            self._requests.fail(sequence, RequestError(ErrorCode.FAILED, text))
            return
        self._requests.recover(sequence, story)
