"""Who is alive: replicas and workers that are silent, steps that are late, requests that do not progress.

Knows when each peer was last heard, and gives up those that are gone. `loop.py` has the sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from interfaces import WEIGHTS
from scheduler.core import Scheduler
from scheduler.process_watch import ProcessWatch
from scheduler.stillness import LOOK_SECONDS

log = logging.getLogger(__name__)

STATUS_SECONDS = 0.5
REPLICA_SILENCE_SECONDS = 5.0
# For an idle worker, which sends a message every second. A busy one is judged by its steps.
WORKER_SILENCE_SECONDS = 10.0
# A check that comes this late means that this process was stopped, or the whole machine suspended.
CLOCK_JUMP_SECONDS = 5.0
SECONDS_BETWEEN_WARNINGS = 10.0


class Health:
    """Checks everything twice a second by `clock`, which is also the scheduler's."""

    def __init__(self, scheduler: Scheduler, watch: ProcessWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self._watch = watch
        self._clock = clock
        self._replica_heard: dict[bytes, float] = {}
        self._worker_heard: dict[int, float] = {}
        # Workers that were late or silent at the last check.
        self._suspected: set[int] = set()
        # Since when requests wait while there is no worker.
        self._without_worker: float | None = None
        self._warned = 0.0
        self._next_check = 0.0
        self._next_search = 0.0
        self._last_check = clock()

    def replica_heard(self, identity: bytes) -> None:
        self._replica_heard[identity] = self._clock()

    def worker_heard(self, index: int) -> None:
        self._worker_heard[index] = self._clock()

    def check_soon(self) -> None:
        """Make the next check due now, because the status has changed."""
        self._next_check = 0.0

    def seconds_left(self) -> float:
        """Seconds until the next check is due."""
        return max(0.0, self._next_check - self._clock())

    def due(self) -> bool:
        return self._clock() >= self._next_check

    def check(self) -> None:
        """Give up peers that are gone and requests whose time is over."""
        now = self._clock()
        self._next_check = now + STATUS_SECONDS
        if now - self._last_check > CLOCK_JUMP_SECONDS:
            self._grant_grace(now)
        self._last_check = now
        for identity in list(self.scheduler.replicas):
            if now - self._replica_heard.get(identity, now) > REPLICA_SILENCE_SECONDS:
                self.drop_replica(identity, f"was silent for {REPLICA_SILENCE_SECONDS:.0f} s")
        self.scheduler.sessions.forget_idle()
        self.scheduler.adapters.sweep()
        # A peer that only asked something is no replica, and sends no goodbye.
        self._replica_heard = {name: at for name, at in self._replica_heard.items() if name in self.scheduler.replicas}
        self._check_workers(now)
        self._warn_of_waiting(now)
        self.scheduler.expire()
        if now >= self._next_search:
            self._next_search = now + LOOK_SECONDS
            self.scheduler.look_for_stuck()

    def drop_replica(self, identity: bytes, why: str) -> None:
        """Give a replica up."""
        cancelled = self.scheduler.drop_replica(identity)
        self._replica_heard.pop(identity, None)
        text = f"API replica {identity.decode(errors='replace')} {why}; {cancelled} requests cancelled"
        self.scheduler.request_log.record_event(text)
        log.info("%s", text)

    def lose_worker(self, index: int, epoch: int, why: str, blamed: bool = True) -> None:
        """Give a worker up, if it still has this epoch."""
        worker = self.scheduler.workers.get(index)
        if worker is not None and worker.hello.epoch == epoch:
            story = self.scheduler.lose_worker(index, why, blamed)
            log.log(logging.ERROR if blamed else logging.INFO, "%s", story)
            self.check_soon()

    def _grant_grace(self, now: float) -> None:
        """Count all times from now: during a jump of the clock no process could send or be heard."""
        log.warning(
            "this process stood still for %.1f s; silence and lateness in that time do not count",
            now - self._last_check,
        )
        self._replica_heard = dict.fromkeys(self._replica_heard, now)
        self._worker_heard = dict.fromkeys(self._worker_heard, now)
        self.scheduler.stuck_detector.grant_grace()
        self.scheduler.oneshot.grant_grace()
        for worker in self.scheduler.workers.values():
            worker.grant_grace()

    def _check_workers(self, now: float) -> None:
        """Give up workers that stall in two checks in a row: this process may itself have been stopped for a while."""
        found = {index: why for index in self.scheduler.workers if (why := self._stall(index, now))}
        for index in self._suspected & found.keys():
            epoch = self.scheduler.workers[index].hello.epoch
            self._watch.mark_stalled(index, epoch, self.scheduler.lose_worker(index, found[index]))
            self.check_soon()
        self._suspected = found.keys() - self._suspected
        for story in self._watch.kill_due():
            log.error("%s", story)
            self.scheduler.request_log.record_event(story)

    def _stall(self, index: int, now: float) -> str:
        """Why a worker seems to hang; empty if it does not."""
        worker = self.scheduler.workers[index]
        late = worker.lateness()
        if late is not None:
            taken, allowed = late
            return f"stalled: the step has taken {taken:.1f} s where {allowed:.1f} s were allowed"
        encoding = worker.images.lateness()
        if encoding is not None:
            return f"stalled: an image has taken {encoding:.0f} s"
        if WEIGHTS in self.scheduler.weights.absent:
            # It reads no adapter until its weights are back.
            worker.adapters.grant_grace()
        reading = worker.adapters.lateness()
        if reading is not None:
            return f"stalled: an adapter has taken {reading:.0f} s"
        changing = worker.weights.lateness()
        if changing is not None:
            return f"stalled: a change of its weights has taken {changing:.0f} s"
        if worker.weights.busy:
            return ""
        silent = now - self._worker_heard.get(index, now)
        if not worker.computing and silent > WORKER_SILENCE_SECONDS:
            return f"was silent for {silent:.1f} s"
        return ""

    def _warn_of_waiting(self, now: float) -> None:
        """Warn of requests that wait long because there is no worker."""
        waiting = len(self.scheduler.waiting) + self.scheduler.oneshot.waiting
        if self.scheduler.workers or not waiting:
            self._without_worker = None
            return
        self._without_worker = self._without_worker or now
        since = now - self._without_worker
        if since > SECONDS_BETWEEN_WARNINGS and now - self._warned > SECONDS_BETWEEN_WARNINGS:
            self._warned = now
            log.warning("%d requests have waited for a model worker for %.0f s; none is here", waiting, since)
