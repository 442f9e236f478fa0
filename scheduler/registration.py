"""How workers come and register, and how those of other machines are found to be cut off.

Knows the names of workers on their socket, and answers through `send`, which returns False for a peer that is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from interfaces import UNREGISTERED, Ping, Refusal, Retire, WireError, WorkerHello
from scheduler import remote_workers
from scheduler.core import Scheduler
from scheduler.health import Health
from scheduler.process_watch import ProcessWatch
from scheduler.remote_workers import RemoteWorkers
from shared.endpoints import is_local_worker, remote_identity

log = logging.getLogger(__name__)

# Names of refused workers that are remembered, so that each is logged once.
MAX_REFUSED = 1024


class Registration:
    """The workers' names on the socket, by index, and the answers to their hellos."""

    def __init__(
        self,
        scheduler: Scheduler,
        health: Health,
        watch: ProcessWatch,
        send: Callable[[bytes, Any], bool],
        first_remote_index: int,
    ) -> None:
        self.identities: dict[int, bytes] = {}
        self._scheduler = scheduler
        self._health = health
        self._watch = watch
        self._send = send
        self._remote = RemoteWorkers(first_remote_index, scheduler.clock)
        # Epochs that wait because another supervisor's worker has their index, by index.
        self._waiting_epochs: dict[int, int] = {}
        # What was logged last about workers that cannot register, by name.
        self._logged: dict[str, str] = {}

    def hear(self, identity: bytes, hello: WorkerHello) -> None:
        """Register a worker, or update it, or answer why not.

        WireError for a peer of another machine that speaks for a worker which it is not.
        """
        scheduler = self._scheduler
        if not is_local_worker(identity) and not (hello.name and identity == remote_identity(hello.name)):
            raise WireError(f"it is not the worker {hello.name!r} of another machine")
        if hello.name and not self._admits(identity, hello):
            return
        if scheduler.is_fenced(hello):
            reason = "it was late or silent, or another came in its place"
            self._send(identity, Retire(hello.epoch, reason, self._remote.was_cut_off(hello)))
            return
        if scheduler.index_is_taken(hello):
            self._say_taken(identity, hello)
            return
        self._health.worker_heard(hello.index)
        if not scheduler.worker_hello(hello):
            return
        log.info("worker %d (%s, epoch %d) is here", hello.index, hello.device, hello.epoch)
        self.identities[hello.index] = identity
        scheduler.workers[hello.index].remote = not is_local_worker(identity)
        self._health.check_soon()
        if is_local_worker(identity) and not self._watch.add(hello.index, hello.epoch, hello.pid):
            self._health.lose_worker(hello.index, hello.epoch, "died")

    def speaks_for(self, identity: bytes, index: int) -> bool:
        """Whether a peer is the worker with this index."""
        return self.identities.get(index) == identity

    def ping(self) -> None:
        """Show workers of other machines that the scheduler is there. Gives up those that cannot be reached."""
        ping = Ping(self._scheduler.incarnation)
        for index, worker in list(self._scheduler.workers.items()):
            if worker.remote and not self._send(self.identities[index], ping):
                self.cut_off(index, "cannot be reached: its connection is broken or silent")

    def cut_off(self, index: int, why: str) -> None:
        """Give up a worker of another machine, which may register again as it is."""
        epoch = self._scheduler.workers[index].hello.epoch
        self._remote.cut_off(index, epoch)
        log.warning("worker %d %s", index, why)
        self._health.lose_worker(index, epoch, why, blamed=False)

    def _admits(self, identity: bytes, hello: WorkerHello) -> bool:
        """Whether a worker of another machine is registered or may be; answers it if not."""
        workers = self._scheduler.workers
        problem = remote_workers.problem(hello, workers)
        if problem:
            waits = workers[remote_workers.compared(workers)].remote
            self._say(hello.name, f"refused worker {hello.name} on {hello.device}: {problem}")
            self._send(identity, Refusal(hello.name, problem, waits))
            return False
        here = next((index for index, worker in workers.items() if worker.hello.name == hello.name), None)
        if hello.epoch != UNREGISTERED:
            return self._has_place(identity, hello, here)
        if here is not None:
            self.cut_off(here, "has lost its connection and comes again")
        welcome = self._remote.welcome(hello, workers)
        if welcome is None:
            self._say(hello.name, f"another worker {hello.index} is here: {hello.name} waits until it has gone")
            return False
        self._logged.pop(hello.name, None)
        self._send(identity, welcome)
        return False

    def _has_place(self, identity: bytes, hello: WorkerHello, here: int | None) -> bool:
        """Whether a registered worker is this scheduler's; tells one of an earlier scheduler to ask anew.

        That one may have sent its hello before it found its connection broken. Then it is about to ask anew, and under
        the old epoch it would take no step.
        """
        place = (hello.index, hello.epoch)
        known = here == hello.index and self._scheduler.workers[here].hello.epoch == hello.epoch
        if known or self._scheduler.is_fenced(hello) or self._remote.place_of(hello.name) == place:
            return True
        self._send(identity, Retire(hello.epoch, "this scheduler has not given it its place", stays=True))
        return False

    def _say_taken(self, identity: bytes, hello: WorkerHello) -> None:
        if hello.name:
            self._send(identity, Retire(hello.epoch, "another worker has its index by now", stays=True))
        elif self._waiting_epochs.get(hello.index) != hello.epoch:
            self._waiting_epochs[hello.index] = hello.epoch
            log.warning("another worker %d is here already: %r waits until it has gone", hello.index, identity)

    def _say(self, name: str, text: str) -> None:
        if self._logged.get(name) != text:
            if len(self._logged) >= MAX_REFUSED:
                self._logged.clear()
            self._logged[name] = text
            log.warning("%s", text)
