"""The adapters of the model: their names, their lives, and the orders of operators to load and unload them.

An adapter is LOADING until every worker that takes adapters has read the same content. READY, it has its name, and
requests get it. LEAVING, it has lost the name: the requests that use it or are on their way go on, and with the last of
them it is gone.
Adapters are loaded one after the other. The registry survives the scheduler in a file of the run directory.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from interfaces import (
    AdapterAnswer,
    AdapterFailed,
    AdapterLoaded,
    AdapterOrder,
    AdapterState,
    AdapterStatus,
    DropAdapter,
    LoadAdapter,
    LoRAOperation,
    LoRAStatus,
    PoolingContext,
    Stage,
    TextContext,
)
from scheduler.adapter import Adapter, AdapterFile, size_of
from scheduler.open_requests import OpenRequests
from scheduler.workers import Worker

log = logging.getLogger(__name__)

# Seconds in which the requests of an earlier scheduler come back for adapters that have lost their names.
RETURN_SECONDS = 60.0
# Seconds that an adapter without its name waits for requests that were prepared for it and are on their way.
LATE_SECONDS = 5.0
# An adapter is given up that so many workers were reading when they died.
_MOST_CRASHES = 3


@dataclass(slots=True)
class _Load:
    """An adapter that is to be loaded, and the order to answer. Without an order the server's own settings want it."""

    adapter: Adapter
    identity: bytes | None = None
    number: int = 0
    # Workers that have not answered.
    waiting: set[int] = field(default_factory=set)
    began: bool = False


class AdapterRegistry:
    """All adapters. `wanted` has the paths of those that the server starts with, by name."""

    def __init__(
        self,
        requests: OpenRequests,
        incarnation: int,
        file: AdapterFile,
        wanted: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Adapters that left workers which are gone.
        self._evictions = 0
        # Why the server cannot start: an adapter of its settings cannot be used. Empty: it can.
        self.fatal = ""
        self._requests = requests
        self._incarnation = incarnation
        self._file = file
        self._clock = clock
        kept = file.read()
        self._adapters = {adapter.handle: adapter for adapter in kept or ()}
        self._names = {one.name: one for one in self._adapters.values() if one.state == AdapterState.READY}
        # Until when requests may still come for adapters without names: those of an earlier scheduler, and late ones.
        leaving = (one.handle for one in self._adapters.values() if one.state == AdapterState.LEAVING)
        self._expected_until = dict.fromkeys(leaving, clock() + RETURN_SECONDS)
        self._last_handle = max(self._adapters, default=0)
        self._answers: list[tuple[bytes, AdapterAnswer]] = []
        self._loads: deque[_Load] = deque()
        if kept is None:
            self._loads.extend(_Load(self._new(name, path)) for name, path in wanted.items())

    @property
    def starting(self) -> bool:
        """Whether adapters of the server's own settings are still to be loaded."""
        return any(load.identity is None for load in self._loads)

    def find(self, context: TextContext | PoolingContext) -> Adapter | None:
        """The adapter that a request was prepared for; None if its content is not here any more."""
        digest = context.adapter_digest
        named = self._names.get(context.adapter)
        if named is not None and named.digest == digest:
            return named
        return next((one for one in self._adapters.values() if one.digest == digest and not _loads(one)), None)

    def status(self) -> list[AdapterStatus]:
        users = self._requests.adapter_users
        workers = self._requests.workers.values()
        return [
            AdapterStatus(
                handle=one.handle,
                name=one.name,
                path=one.path,
                digest=one.digest,
                rank=one.rank,
                size=one.size,
                pinned=one.pinned,
                state=one.state,
                requests=users[one.handle],
                workers=sum(worker.adapters.holds(one) for worker in workers),
            )
            for one in self._adapters.values()
        ]

    @property
    def evictions(self) -> int:
        """Times that an adapter has left a worker because others wanted its room."""
        return self._evictions + sum(worker.adapters.evictions for worker in self._requests.workers.values())

    def take_answers(self) -> list[tuple[bytes, AdapterAnswer]]:
        """The answers to orders since the last call."""
        answers = self._answers
        self._answers = []
        return answers

    # Orders

    def obey(self, identity: bytes, order: AdapterOrder) -> None:
        """Carry out an operator's order, or begin to."""
        request = order.request
        name = request.lora_name
        if request.operation is LoRAOperation.UNLOAD:
            self._unload(identity, order.number, name)
        elif not request.lora_path:
            self._answer(identity, order.number, LoRAStatus.LOAD_INVALID_PATH, "the order names no path")
        elif name in self._names and not order.replace:
            text = f"there is an adapter {name!r} already: unload it first, or load this one in place"
            self._answer(identity, order.number, LoRAStatus.LOAD_NAME_EXISTS, text)
        elif any(load.adapter.name == name for load in self._loads):
            text = f"an adapter {name!r} is being loaded: wait until it is there"
            self._answer(identity, order.number, LoRAStatus.LOAD_NAME_EXISTS, text)
        else:
            adapter = self._new(name, request.lora_path, order.pinned)
            self._loads.append(_Load(adapter, identity, order.number))
            self._begin_next()

    def sweep(self) -> None:
        """Forget the adapters that have lost their names, that no request uses, and for which none can come."""
        now = self._clock()
        users = self._requests.adapter_users
        leaving = [one for one in self._adapters.values() if one.state == AdapterState.LEAVING]
        gone = [one for one in leaving if not users[one.handle] and now >= self._expected_until[one.handle]]
        for adapter in gone:
            self._forget(adapter)
        if gone:
            self._keep()

    def _unload(self, identity: bytes, number: int, name: str) -> None:
        adapter = self._names.get(name)
        if adapter is None:
            text = f"there is no adapter {name!r}"
            self._answer(identity, number, LoRAStatus.UNLOAD_NAME_NONEXISTENT, text)
            return
        users = self._requests.adapter_users[adapter.handle]
        self._leave(adapter)
        self._keep()
        self.sweep()
        self._answer(identity, number, LoRAStatus.SUCCESS, f"{users} requests still use it" if users else "", users)

    # Workers

    def worker_joined(self, worker: Worker) -> None:
        """Let a new worker read the adapters, pinned ones and those in use first, as far as there is room."""
        held = worker.adapters
        if not held.takes_any:
            self._begin_next()
            return
        if self._loads and self._loads[0].began:
            self._send(self._loads[0], worker)
        users = self._requests.adapter_users
        known = (one for one in self._adapters.values() if not _loads(one))
        for adapter in sorted(known, key=lambda one: (not one.pinned, not users[one.handle], -one.handle)):
            if adapter.crashes >= _MOST_CRASHES:
                held.refuse(adapter, f"{adapter.crashes} model workers died while they read {adapter}")
            elif held.has_room(adapter):
                held.load(adapter)
        self._begin_next()

    def worker_lost(self, worker: Worker, blamed: bool) -> None:
        """Count the crashes of the adapters that the worker was reading, and wait for it no longer."""
        self._evictions += worker.adapters.evictions
        for adapter in worker.adapters.loading if blamed else ():
            adapter.crashes += 1
        load = self._loads[0] if self._loads else None
        if load is not None and load.began:
            load.waiting.discard(worker.hello.index)
            if load.adapter.crashes >= _MOST_CRASHES:
                text = f"{load.adapter.crashes} model workers died while they read it"
                self._fail(load, LoRAStatus.LOAD_ERROR, text)
            elif not load.waiting and load.adapter.digest:
                self._complete(load)
        self._begin_next()

    def take_messages(self) -> list[tuple[int, LoadAdapter | DropAdapter]]:
        """What workers must be sent about adapters before their next steps."""
        return [
            (index, message)
            for index, worker in self._requests.workers.items()
            for message in worker.adapters.take_messages(self._incarnation, worker.hello.epoch)
        ]

    def loaded(self, message: AdapterLoaded) -> None:
        """Let the rows run that wait for an adapter, which a worker of this epoch has read."""
        worker = self._requests.workers[message.index]
        adapter = self._adapters.get(message.handle)
        if adapter is None or message.incarnation != self._incarnation:
            return
        adapter.crashes = 0
        for sequence in worker.adapters.loaded(message.handle):
            self._requests.record(sequence, f"worker {message.index} has read its adapter")
        if self._loads and self._loads[0].adapter is adapter:
            self._first_read(self._loads[0], worker, message)
        self._begin_next()

    def failed(self, message: AdapterFailed) -> None:
        """Take the sequences off a worker of this epoch that cannot use their adapter. Another worker may."""
        worker = self._requests.workers[message.index]
        adapter = self._adapters.get(message.handle)
        if adapter is None or message.incarnation != self._incarnation:
            return
        reason = message.reason
        if message.digest and adapter.digest and message.digest != adapter.digest:
            reason = f"the files in {adapter.path} have changed since it was loaded; load it again, in place"
        self._record(f"worker {message.index} cannot use {adapter}: {reason}", logging.ERROR)
        for sequence in worker.adapters.failed(adapter, f"the {adapter} cannot be used: {reason}"):
            worker.remove(sequence.row)
            story = f"worker {message.index} cannot use its adapter; it waits for another"
            self._requests.record(sequence, story, Stage.QUEUED)
            self._requests.waiting.add(sequence)
        if self._loads and self._loads[0].adapter is adapter:
            kind = LoRAStatus.LOAD_INVALID_PATH if message.missing else LoRAStatus.LOAD_INVALID_ADAPTER
            self._fail(self._loads[0], kind, reason)
        self._begin_next()

    # Inside

    def _new(self, name: str, path: str, pinned: bool = False) -> Adapter:
        self._last_handle += 1
        adapter = Adapter(self._last_handle, name, path, size_of(path), pinned)
        self._adapters[adapter.handle] = adapter
        return adapter

    def _begin_next(self) -> None:
        """Begin to load the next adapter, once there are workers and the last one is there.

        It may be one more than fits beside those in use: it is read to be checked, and leaves at once then.
        """
        while self._loads and not self._loads[0].began and self._requests.workers:
            load = self._loads[0]
            able = [worker for worker in self._requests.workers.values() if worker.adapters.takes_any]
            problem = "this model takes no adapters" if not able else self._too_large(load.adapter)
            if problem:
                self._fail(load, LoRAStatus.LOAD_ERROR, problem)
                continue
            load.began = True
            for worker in able:
                self._send(load, worker)

    def _send(self, load: _Load, worker: Worker) -> None:
        load.waiting.add(worker.hello.index)
        worker.adapters.load(load.adapter)

    def _first_read(self, load: _Load, worker: Worker, message: AdapterLoaded) -> None:
        """A worker has read an adapter that is not READY."""
        adapter = load.adapter
        if adapter.digest and adapter.digest != message.digest:
            text = f"workers read different contents in {adapter.path}: do not change files while they are loaded"
            self._fail(load, LoRAStatus.LOAD_ERROR, text)
            return
        adapter.digest = message.digest
        adapter.rank = message.rank
        adapter.size = message.size
        # It may be larger than its files were.
        worker.adapters.make_room()
        load.waiting.discard(worker.hello.index)
        if not load.waiting:
            self._complete(load)

    def _complete(self, load: _Load) -> None:
        """Give an adapter that all workers have read its name."""
        adapter = load.adapter
        problem = self._too_large(adapter)
        if problem:
            self._fail(load, LoRAStatus.LOAD_ERROR, problem)
            return
        self._loads.popleft()
        before = self._names.get(adapter.name)
        if before is not None and before.digest == adapter.digest:
            # The same content again: requests that use it need not be told apart.
            self._renew(before, adapter)
        else:
            if before is not None:
                self._leave(before)
            adapter.state = AdapterState.READY
            self._names[adapter.name] = adapter
            self._requests.counters["adapter_loads"] += 1
            self._record(f"{adapter} is ready: rank {adapter.rank}, {adapter.size} bytes, from {adapter.path}")
        self._keep()
        self.sweep()
        if load.identity is not None:
            self._answer(load.identity, load.number, LoRAStatus.SUCCESS, "")

    def _renew(self, before: Adapter, again: Adapter) -> None:
        """Let an adapter go on with the same content from where it was read again, also where reading it had failed."""
        old_path = before.path
        before.path = again.path
        again.path = old_path
        before.pinned = again.pinned
        before.crashes = 0
        for worker in self._requests.workers.values():
            worker.adapters.forgive(before)
        self._forget(again)

    def _fail(self, load: _Load, status: LoRAStatus, reason: str) -> None:
        """Give up loading an adapter."""
        self._loads.remove(load)
        self._forget(load.adapter)
        if load.identity is not None:
            self._answer(load.identity, load.number, status, reason)
        else:
            self.fatal = f"the adapter {load.adapter.name!r} of the setting lora cannot be used: {reason}"

    def _too_large(self, adapter: Adapter) -> str:
        """Why an adapter could wait for ever: pinned ones, and one other at a time, must have room on each worker."""
        others = [one for one in self._names.values() if one.name != adapter.name]
        everyone = [adapter, *others]
        pinned = sum(one.size for one in everyone if one.pinned)
        largest = max((one.size for one in everyone if not one.pinned), default=0)
        able = (worker.adapters.memory for worker in self._requests.workers.values() if worker.adapters.takes_any)
        memory = min(able, default=None)
        if memory is None or pinned + largest <= memory:
            return ""
        return (
            f"it takes {adapter.size} bytes, and adapters may take {memory} (lora_memory), of which pinned ones take "
            f"{pinned}: raise lora_memory, or pin fewer"
        )

    def _leave(self, adapter: Adapter) -> None:
        """Take the name from an adapter."""
        del self._names[adapter.name]
        adapter.state = AdapterState.LEAVING
        adapter.pinned = False
        self._expected_until[adapter.handle] = self._clock() + LATE_SECONDS

    def _forget(self, adapter: Adapter) -> None:
        """Free an adapter that no request uses, everywhere."""
        del self._adapters[adapter.handle]
        self._expected_until.pop(adapter.handle, None)
        for worker in self._requests.workers.values():
            worker.adapters.drop(adapter)
        if all(one.path != adapter.path for one in self._adapters.values()):
            self._file.discard(adapter.path)
        if not _loads(adapter):
            self._record(f"{adapter} is gone")

    def _keep(self) -> None:
        """Write the file. Without one the next scheduler begins with the settings, so all of those must be in it."""
        if self.starting:
            return
        self._file.write([one for one in self._adapters.values() if not _loads(one)])

    def _record(self, text: str, level: int = logging.INFO) -> None:
        log.log(level, "%s", text)
        self._requests.request_log.record_event(text)

    def _answer(self, identity: bytes, number: int, status: LoRAStatus, text: str, requests: int = 0) -> None:
        answer = AdapterAnswer(self._incarnation, number, status, text, requests, self.status())
        self._answers.append((identity, answer))


def _loads(adapter: Adapter) -> bool:
    return adapter.state == AdapterState.LOADING
