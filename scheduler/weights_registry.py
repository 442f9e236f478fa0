"""The version of the weights that is served: orders to change it, and workers that follow.

One order is carried out at a time. A change has two parts: every worker prepares the new version beside the old one,
and when all have, and no step is in flight, all take it into use. So a version that some worker cannot use changes
nothing, and no two workers serve different ones. The file of the version is written before the first worker changes: a
worker that starts reads the file, and one that has another version is led to it before it gets work.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from interfaces import (
    KV_CACHE,
    WEIGHTS,
    RunningMode,
    WeightsAction,
    WeightsAnswer,
    WeightsCommand,
    WeightsOrder,
    WeightsReport,
    WeightsStatus,
    WeightsTask,
)
from scheduler import operator_commands
from scheduler.open_requests import OpenRequests
from scheduler.weights_change import GROUP_TASKS, Change, Phase, obstacle, version_after
from scheduler.weights_followers import WeightsFollowers
from scheduler.weights_uploads import WeightsUploads
from scheduler.workers import Worker
from shared.weights_file import Served, WeightsFile, overlay_of

log = logging.getLogger(__name__)

_EVERY_REQUEST = [""]
_MEMORY = (WEIGHTS, KV_CACHE)


class WeightsRegistry:
    """The version that is served, in a file of the run directory. Tensors that come over a group go beside it."""

    def __init__(self, requests: OpenRequests, incarnation: int, file: WeightsFile) -> None:
        # Whether an operator has paused generation: then requests are as that operator wants them.
        self.paused = False
        self._requests = requests
        self._incarnation = incarnation
        self._file = file
        self._served = file.read()
        requests.version = self._served.version.name
        self._last_number = self._served.version.number
        self._orders: deque[tuple[bytes, WeightsOrder]] = deque()
        self._change: Change | None = None
        self._uploads = WeightsUploads(file, incarnation, self._served)
        self._answers: list[tuple[bytes, WeightsAnswer]] = []
        self._followers = WeightsFollowers(incarnation)

    @property
    def absent(self) -> list[str]:
        """Tags of memory that was released: nothing is computed without it."""
        return self._served.absent

    @property
    def standstill(self) -> str:
        """Why an operator has nothing computed, and the remedy; empty if requests run."""
        if self.absent:
            remedy = "POST /resume_memory_occupation or /wake_up takes it again"
            return f"memory was released ({', '.join(self.absent)}); {remedy}"
        if self._requests.drain.active:
            return "generation is about to be paused; new requests wait for the end of the running ones"
        return "generation is paused; POST /continue_generation resumes it" if self.paused else ""

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be sent."""
        return bool(self.absent) or (self._change is not None and self._change.phase == Phase.STILL)

    @property
    def holds_requests(self) -> bool:
        """Whether no request may be placed that did not run before."""
        changes = self._change is not None and self._change.phase == Phase.DRAIN
        return self._requests.drain.active or self.holds_steps or changes

    @property
    def changing(self) -> bool:
        """Whether requests may stand still because of an order."""
        return self._change is not None or self.holds_steps or self._requests.drain.active

    def pause(self, paused: bool) -> None:
        """Let no step start, or let steps start again."""
        self.paused = paused
        self._requests.drain.end()

    def status(self) -> WeightsStatus:
        version = self._served.version
        return WeightsStatus(version.number, version.name, version.source, list(self.absent), self._change is not None)

    def take_answers(self) -> list[tuple[bytes, WeightsAnswer]]:
        """The answers to orders since the last call."""
        answers = self._answers
        self._answers = []
        return answers

    def take_messages(self) -> list[tuple[int, WeightsCommand]]:
        """What workers must be sent before their next steps."""
        workers = self._requests.workers.items()
        return [(index, message) for index, worker in workers for message in worker.weights.take_messages()]

    # Orders

    def obey(self, identity: bytes, order: WeightsOrder) -> None:
        """Carry out an operator's order, after those before it."""
        self._orders.append((identity, order))
        self.advance()

    def advance(self) -> None:
        """Go on with the order in hand as far as it can go now, and begin the next ones."""
        while True:
            change = self._change
            if change is None:
                if not self._orders or self._must_wait(self._orders[0][1]):
                    return
                self._change = change = Change(*self._orders.popleft())
                self._go_on(change, self._begin)
            elif change.phase == Phase.DRAIN and (self.paused or not self._requests.started):
                change.phase = Phase.STILL
            elif change.phase == Phase.LED and not self._followers.leading:
                self._go_on(change, self._prepare)
            elif change.phase == Phase.STILL and not any(w.computing for w in self._requests.workers.values()):
                self._go_on(change, self._when_still)
            else:
                return

    def _must_wait(self, order: WeightsOrder) -> bool:
        """Whether a worker that is led to the version that is served would mistake the order's for it."""
        return self._followers.leading and order.action not in (WeightsAction.JOIN, WeightsAction.LEAVE)

    def _go_on(self, change: Change, step: Callable[[Change], None]) -> None:
        """Do a step of an order. An error of ours refuses this order, and not those after it."""
        try:
            step(change)
        except Exception as error:
            log.exception("order %d about the weights failed", change.order.number)
            if self._change is change:
                self._fail(change, f"the scheduler's log has the reason ({type(error).__name__})")

    def _begin(self, change: Change) -> None:
        order = change.order
        change.files = list(order.overlays)
        problem = obstacle(order, self._requests.workers.values(), self._uploads.held)
        if problem:
            self._refuse(change, problem, unavailable=not self._requests.workers)
            return
        match order.action:
            case WeightsAction.UPDATE if order.hold:
                self._hold(change)
            case WeightsAction.UPDATE:
                self._prepare(change)
            case WeightsAction.RELEASE:
                self._begin_release(change)
            case WeightsAction.RESUME:
                self._ask(change, WeightsTask.RESUME, tags=order.tags)
            case WeightsAction.JOIN | WeightsAction.LEAVE | WeightsAction.RECEIVE:
                self._ask_group(change)
            case WeightsAction.READ:
                self._ask(change, WeightsTask.READ, {min(self._requests.workers)}, name=order.name, most=order.most)
            case _:
                self._rename(change)

    def _begin_release(self, change: Change) -> None:
        tags = [tag for tag in _MEMORY if tag in change.order.tags]
        if KV_CACHE in tags:
            operator_commands.retract(self._requests)
        self._set_absent([tag for tag in _MEMORY if tag in tags or tag in self.absent])
        change.phase = Phase.STILL

    def _ask_group(self, change: Change) -> None:
        order = change.order
        assert order.group is not None
        path = ""
        if order.action == WeightsAction.RECEIVE:
            path = self._uploads.new_path()
            if not path:
                self._refuse(change, "this server has no run directory for tensors that are sent to it")
                return
            change.files.append(path)
        self._ask(
            change, GROUP_TASKS[order.action], group=order.group, path=path, sender=order.sender, tensors=order.tensors
        )

    def _rename(self, change: Change) -> None:
        served = replace(self._served, version=replace(self._served.version, name=change.order.version))
        if self._write(change, served):
            self._end(change)

    # Versions

    def _prepare(self, change: Change) -> None:
        """Have every worker load a version beside the one that it uses."""
        overlays = [overlay_of(path) for path in change.files]
        # An update from a folder forgets what was received before it; so does one that fails.
        received = self._uploads.take()
        change.files = [overlay.path for overlay in (*received, *overlays)]
        self._last_number += 1
        change.target = version_after(self._served, change.order, self._last_number, received, overlays)
        self._ask(change, WeightsTask.PREPARE, version=change.target.version)

    def _prepared(self, change: Change) -> None:
        """All workers have the new version: what becomes of the requests?"""
        running = change.order.running
        if running == RunningMode.ABORT:
            operator_commands.abort(self._requests, _EVERY_REQUEST)
        elif running == RunningMode.RETRACT:
            operator_commands.retract(self._requests)
        waits = running == RunningMode.WAIT and not self.paused and not self.absent
        change.phase = Phase.DRAIN if waits else Phase.STILL

    def _when_still(self, change: Change) -> None:
        """No step is in flight, and none is sent: workers change."""
        change.phase = Phase.ANSWERS
        if change.order.action == WeightsAction.RELEASE:
            if KV_CACHE in change.order.tags:
                for worker in self._requests.workers.values():
                    worker.forget_prefixes()
                for sequence in self._requests.waiting:
                    sequence.elsewhere = None
            self._ask(change, WeightsTask.RELEASE, tags=change.order.tags)
            return
        assert change.target is not None
        stamps = {report.stamp for report in change.reports.values()}
        if len(stamps) != 1:
            self._fail(change, "workers read different files: do not change them while they are read")
            return
        prepared = change.alive(self._requests.workers)
        target = replace(change.target, version=replace(change.target.version, stamp=stamps.pop()))
        before = self._served
        if not self._write(change, target):
            return
        self._uploads.discard([*before.version.overlays, *change.files], target.version.overlays)
        self._requests.request_log.record_event(f"the weights are those of version {target.version.name!r} now")
        log.info("version %r of the weights is served, number %d", target.version.name, target.version.number)
        for index in prepared:
            self._requests.workers[index].change_weights(target.version.number)
        self._ask(change, WeightsTask.USE, prepared, version=target.version)
        for index, worker in self._requests.workers.items():
            if index not in prepared:
                self._followers.lead(worker, self._served)

    def _write(self, change: Change, served: Served) -> bool:
        """Serve this from now on, if the file of it can be written."""
        try:
            self._file.write(served)
        except OSError as error:
            self._fail(change, f"the run directory has no room for the name of the version: {error.strerror}")
            return False
        self._served = served
        self._requests.version = served.version.name
        return True

    def _set_absent(self, tags: list[str]) -> None:
        self._served = replace(self._served, absent=tags)
        try:
            self._file.write(self._served)
        except OSError as error:
            log.error("the file of the weights' version cannot be written: %s", error)

    # Workers

    def worker_joined(self, worker: Worker) -> None:
        """Lead a worker to the version that is served, and to the memory that it may have, before it gets work."""
        self._followers.welcome(worker, self._served)
        self.advance()

    def worker_lost(self, worker: Worker, blamed: bool) -> None:
        """Wait for a worker no longer. One that died while it loaded new weights may have died of them."""
        change = self._change
        self._followers.lost(worker)
        if change is None or worker.hello.index not in change.waiting:
            return
        change.waiting.discard(worker.hello.index)
        if change.task == WeightsTask.PREPARE and blamed:
            text = "a model worker died while it read them; if memory ran out, give the old ones back first"
            self._fail(change, text)
        elif change.task in (WeightsTask.JOIN, WeightsTask.RECEIVE):
            self._fail(change, "a model worker died meanwhile: initialise the group again")
        elif not change.waiting:
            self._go_on(change, self._answered)

    def heard(self, report: WeightsReport) -> str:
        """Take a report of a worker of this epoch. Returns why the worker must go; empty if it need not."""
        worker = self._requests.workers[report.index]
        if report.incarnation != self._incarnation:
            self._uploads.remove_strays(self._served)
            return ""
        command = worker.weights.answered(report.number)
        if command is None:
            return ""
        change = self._change
        if change is not None and change.asked.get(report.index) == report.number:
            problem = self._hear_for(change, worker, report)
        else:
            # Tensors of an order that was given up before they came.
            self._uploads.discard([command.path])
            problem = self._followers.heard(worker, command, report, self._served)
        self.advance()
        return problem

    def _hear_for(self, change: Change, worker: Worker, report: WeightsReport) -> str:
        change.waiting.discard(report.index)
        del change.asked[report.index]
        change.reports[report.index] = report
        problem = ""
        if change.task == WeightsTask.USE and report.error:
            # The version is served already: this worker must go, and the others serve it.
            problem = f"cannot serve version {self._served.version.name!r} of the weights: {report.error}"
        elif change.task == WeightsTask.USE:
            self._followers.in_use(worker, self._served)
        elif report.error:
            self._fail(change, report.error)
            return ""
        if not change.waiting:
            self._go_on(change, self._answered)
        return problem

    def _answered(self, change: Change) -> None:
        """All workers have answered."""
        match change.task:
            case WeightsTask.PREPARE:
                self._prepared(change)
            case WeightsTask.RECEIVE:
                if change.order.hold:
                    self._hold(change)
                else:
                    change.phase = Phase.LED
            case WeightsTask.RESUME:
                self._set_absent([tag for tag in self.absent if tag not in change.order.tags])
                for index, worker in self._requests.workers.items():
                    if change.epochs.get(index) != worker.hello.epoch:
                        # It came meanwhile, and was asked to release the same.
                        self._followers.send(worker, WeightsTask.RESUME, tags=change.order.tags)
                self._end(change)
            case WeightsTask.READ:
                report = next(iter(change.reports.values()), None)
                if report is None:
                    self._refuse(change, "the model worker is gone: try again", unavailable=True)
                else:
                    self._end(change, report)
            case _:
                self._end(change)

    def _hold(self, change: Change) -> None:
        problem = self._uploads.hold([overlay_of(path) for path in change.files])
        if problem:
            self._refuse(change, problem)
        else:
            self._end(change)

    # Ends

    def _fail(self, change: Change, reason: str) -> None:
        """Give a change up: some worker cannot make it."""
        if change.task == WeightsTask.PREPARE:
            for index in change.alive(self._requests.workers):
                self._followers.send(self._requests.workers[index], WeightsTask.ABANDON)
        self._refuse(change, reason)

    def _refuse(self, change: Change, reason: str, unavailable: bool = False) -> None:
        self._uploads.discard(change.files, self._served.version.overlays)
        self._requests.request_log.record_event(f"an order about the weights was refused: {reason}")
        self._finish(change, WeightsAnswer(self._incarnation, change.order.number, reason, "", unavailable))

    def _end(self, change: Change, report: WeightsReport | None = None) -> None:
        answer = WeightsAnswer(self._incarnation, change.order.number, "", "")
        if report is not None:
            answer = replace(answer, values=report.values, shape=report.shape)
        self._finish(change, answer)

    def _finish(self, change: Change, answer: WeightsAnswer) -> None:
        self._change = None
        opened = self._requests.running + len(self._requests.waiting)
        answer = replace(answer, version=self._served.version.name, requests=opened)
        self._answers.append((change.identity, answer))

    # Messages

    def _ask(self, change: Change, task: int, among: set[int] | None = None, **facts: object) -> None:
        """Ask all workers, or those `among` them."""
        change.task = task
        change.phase = Phase.ANSWERS
        change.reports = {}
        workers = self._requests.workers
        asked = sorted(workers if among is None else among)
        change.waiting = set(asked)
        change.epochs = {index: workers[index].hello.epoch for index in asked}
        send = self._followers.send
        change.asked = {index: send(workers[index], task, at, **facts) for at, index in enumerate(asked)}
        if not asked:
            self._answered(change)
