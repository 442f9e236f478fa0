"""Runs the requests of batches, when nothing else runs, in one API process of the server.

The process that holds the folder's lock is the one; when it dies another takes over. A request whose result is in the
output is done; all others run again. So each has exactly one result, whatever is killed and whenever. Requests go
through the ordinary routes at the lowest priority, and only as many at a time as find room.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from api_server.batches import lines
from api_server.batches.calls import Answer, failed
from api_server.batches.lines import Line, WrongInput
from api_server.batches.records import Batch, StoredFile, file_id_of
from api_server.batches.store import Store

log = logging.getLogger("tokenyard")

# Seconds between looks for new batches, and for their cancellation.
LOOK_SECONDS = 1.0
# Seconds between looks at the folder's size, and results that are gathered before they are written.
_ROOM_SECONDS = 30.0
_LONGEST_WAIT = 60.0
# Bytes that must be free before a request is sent.
_ROOM_BYTES = 4 << 20

# Most batches that are open, all together and of one tenant: their lines are in memory.
MOST_OPEN = 16
MOST_OPEN_OF_TENANT = 2
# Seconds between looks for what processes have left.
_TIDY_SECONDS = 3600.0

T = TypeVar("T")

# Sends a body to a path for a tenant within so many seconds.
Send = Callable[[str, str, dict[str, Any], int], Awaitable[Answer]]


@dataclass
class _Job:
    """A batch that runs in this process."""

    batch: Batch
    folder: Path
    waiting: deque[Line] = field(default_factory=deque)
    running: dict[asyncio.Task[Answer], Line] = field(default_factory=dict)
    # No request is sent before this time, on time.monotonic's clock.
    pause: float = 0.0
    reads: asyncio.Task[list[Line]] | None = None
    # True when no request is sent any more.
    ending: bool = False

    @property
    def input(self) -> Path:
        return self.folder / "input.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / "output.jsonl"

    @property
    def errors(self) -> Path:
        return self.folder / "errors.jsonl"


class Runner:
    """The loop. `room` gives the requests that may run now, of those that do."""

    def __init__(self, store: Store, send: Send, room: Callable[[int], int]) -> None:
        self._store = store
        self._send = send
        self._room = room
        self._jobs: dict[str, _Job] = {}
        # Ids of batches that are at their end, which need not be read again.
        self._ended: set[str] = set()
        self._measured = float("-inf")
        self._tidied = float("-inf")
        self._full = False
        # True when no further request is sent, because this process will end.
        self.leaving = False
        # Threads of its own: others' work does not wait for batches, and at the end their last write is awaited.
        self._threads = ThreadPoolExecutor(4, "batches")

    async def run(self) -> None:
        """Waits for the lock, and runs batches until it is cancelled, or is leaving and has nothing under way."""
        self._store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._store.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _locked(descriptor):
                if self.leaving:
                    return
                await asyncio.sleep(LOOK_SECONDS)
            while not self.leaving or self._running:
                await self._step()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._leave(descriptor)

    async def _leave(self, descriptor: int) -> None:
        """Gives up the lock, when nothing is written any more."""
        try:
            await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        finally:
            self._threads.shutdown()
            os.close(descriptor)

    async def _apart(self, work: Callable[..., T], *values: Any) -> T:
        """Does work in a thread of the runner."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(work, *values))

    @property
    def _running(self) -> list[asyncio.Task[Answer]]:
        return [task for job in self._jobs.values() for task in job.running]

    async def _step(self) -> None:
        """Takes new batches, sends requests as far as there is room, and writes down what has ended."""
        try:
            await self._look()
        except OSError as error:
            log.warning("batches wait: their folder cannot be used: %s", error)
        self._fill()
        running = self._running
        if any(not task.done() for task in running):
            await asyncio.wait(running, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(LOOK_SECONDS)
        for job in list(self._jobs.values()):
            await self._attend(job)

    async def _attend(self, job: _Job) -> None:
        """Brings a batch on. What goes wrong with one stops no other."""
        try:
            await self._gather(job)
            await self._advance(job)
        except OSError as error:
            log.warning("the batch %s waits: its folder cannot be used: %s", job.batch.id, error)
        except Exception as error:
            log.exception("the batch %s fails by an error of ours", job.batch.id)
            with contextlib.suppress(OSError):
                await self._fail(job, [{"code": "server_error", "message": f"an error of the server: {error}"}])

    async def _look(self) -> None:
        if self.leaving:
            return
        if time.monotonic() - self._tidied > _TIDY_SECONDS:
            self._tidied = time.monotonic()
            await self._apart(self._store.tidy)
        fresh = await self._apart(self._store.fresh, {*self._ended, *self._jobs})
        self._ended.update(batch.id for batch in fresh if not batch.active)
        for batch in self._chosen([batch for batch in fresh if batch.active]):
            job = self._jobs[batch.id] = _Job(batch, self._store.folder_of(batch))
            job.reads = asyncio.create_task(self._apart(self._open, job))
        if time.monotonic() - self._measured > _ROOM_SECONDS:
            self._measured = time.monotonic()
            await self._apart(self._store.delete_expired)
            full = await self._apart(self._store.room) < _ROOM_BYTES
            if full and not self._full:
                log.warning("batches wait: %s is full; delete files, or raise --batch-space", self._store.folder)
            self._full = full

    def _chosen(self, waiting: Sequence[Batch]) -> list[Batch]:
        """The batches to open: those of tenants with the fewest open ones first, and of those the oldest."""
        left = list(waiting)
        chosen: list[Batch] = []
        counts = Counter(job.batch.tenant for job in self._jobs.values())
        while left and len(self._jobs) + len(chosen) < MOST_OPEN:
            batch = min(left, key=lambda batch: counts[batch.tenant])
            if counts[batch.tenant] >= MOST_OPEN_OF_TENANT:
                break
            left.remove(batch)
            chosen.append(batch)
            counts[batch.tenant] += 1
        return chosen

    def _open(self, job: _Job) -> list[Line]:
        """Reads the input, and returns the requests that have no result yet. Raises WrongInput."""
        for path in (job.output, job.errors):
            lines.mend(path)
        results = (result for path in (job.output, job.errors) for result in lines.read_results(path))
        return lines.read_input(job.input, job.batch.endpoint, {lines.mark_of(one["custom_id"]) for one in results})

    def _fill(self) -> None:
        """Sends a request of each batch in turn, as long as there is room."""
        count = len(self._running)
        most = 0 if self.leaving or self._full else self._room(count)
        now = time.monotonic()
        started = (job for job in self._jobs.values() if job.batch.status == "in_progress" and not job.ending)
        ready = deque(job for job in started if job.pause <= now)
        while ready and count < most:
            job = ready.popleft()
            if job.waiting:
                line = job.waiting.popleft()
                job.running[asyncio.create_task(self._ask(job, line))] = line
                count += 1
                ready.append(job)

    async def _ask(self, job: _Job, line: Line) -> Answer:
        """Answers a request. OSError where it cannot be answered now."""
        try:
            body = await self._apart(lines.body_of, job.input, line)
            seconds = max(1, job.batch.expires_at - int(time.time()))
            return await self._send(job.batch.tenant, job.batch.endpoint, body, seconds)
        except OSError:
            raise
        except Exception as error:
            log.exception("a request of the batch %s fails by an error of ours", job.batch.id)
            return failed("", 500, "api_error", f"an error of the server: {error}")

    async def _gather(self, job: _Job) -> None:
        """Writes down the results of requests that have ended; those that could not be served wait again."""
        ended: dict[Path, list[asyncio.Task[Answer]]] = {job.output: [], job.errors: []}
        for task in [task for task in job.running if task.done()]:
            answer = task.result() if not task.cancelled() and task.exception() is None else Answer("")
            if answer.comes_again:
                job.waiting.appendleft(job.running.pop(task))
                job.pause = time.monotonic() + _seconds_of(answer)
            else:
                ended[job.output if answer.status < 400 else job.errors].append(task)
        for path, tasks in ended.items():
            answered = [(job.running[task], task.result()) for task in tasks]
            await self._apart(_write_down, job, path, answered)
            # Only now: where the file takes no more, the results are kept for the next attempt.
            for task in tasks:
                del job.running[task]
        results, errors = (len(tasks) for tasks in ended.values())
        if results or errors:
            batch = job.batch
            job.batch = replace(batch, completed=batch.completed + results, failed=batch.failed + errors)
            await self._apart(self._store.save, job.batch)

    async def _advance(self, job: _Job) -> None:
        """Brings a batch to its next status, if it is time."""
        if job.reads is not None:
            if not job.reads.done():
                return
            reads, job.reads = job.reads, None
            await self._begin(job, reads)
        batch = job.batch
        if batch.status == "in_progress":
            ended = ""
            if asked := await self._apart(self._store.cancelled_at, batch):
                ended = "cancelled"
                job.batch = replace(batch, times={**batch.times, "cancelling": asked})
            elif time.time() >= batch.expires_at:
                ended = "expired"
            if ended:
                await self._break_off(job, ended)
            elif not job.waiting and not job.running:
                await self._finish(job, "completed")

    async def _begin(self, job: _Job, reads: asyncio.Task[list[Line]]) -> None:
        """Makes a batch run whose input has been read. Nothing is sent before that is on the disk."""
        try:
            found = reads.result()
            counts = await self._apart(_counts, job)
            counts["total"] = len(found) + counts["completed"] + counts["failed"]
            # A batch of an earlier process keeps the time at which it began.
            batch = job.batch
            batch = (
                batch.became("in_progress") if batch.status == "validating" else replace(batch, status="in_progress")
            )
            batch = replace(batch, **counts)
            await self._apart(self._store.save, batch)
        except WrongInput as wrong:
            await self._fail(job, wrong.errors)
        except OSError:
            self._jobs.pop(job.batch.id, None)  # the next look opens it again
            raise
        else:
            job.waiting = deque(found)
            job.batch = batch

    async def _fail(self, job: _Job, errors: list[dict[str, Any]]) -> None:
        """Ends a batch that cannot be run. OSError where that cannot be written: the next look opens it again."""
        for task in job.running:
            task.cancel()
        await asyncio.gather(*job.running, return_exceptions=True)
        job.running.clear()
        self._jobs.pop(job.batch.id, None)
        job.batch = job.batch.became("failed", errors=errors)
        await self._apart(self._store.save, job.batch)
        await self._end(job)

    async def _break_off(self, job: _Job, status: str) -> None:
        """Ends a batch before its time: requests without a result get one that says why."""
        job.ending = True
        for task in job.running:
            task.cancel()
        await asyncio.gather(*job.running, return_exceptions=True)
        finished = [task for task in job.running if not task.cancelled() and task.exception() is None]
        for task in [task for task in job.running if task not in finished]:
            job.waiting.append(job.running.pop(task))
        await self._gather(job)
        message = {
            "cancelled": "the batch was cancelled before this request was run",
            "expired": "the batch's time had passed before this request was run",
        }[status]
        await self._apart(_write_off, job, f"batch_{status}", message)
        # Only now: where the file takes no more, the next attempt has them all.
        job.waiting.clear()
        await self._finish(job, status)

    async def _finish(self, job: _Job, status: str) -> None:
        batch = job.batch if job.batch.status == "finalizing" else job.batch.became("finalizing")
        await self._apart(self._store.save, batch)
        made = await self._apart(self._publish, job, batch)
        counts = await self._apart(_counts, job)
        ended = batch.became(status, **made, **counts)
        await self._apart(self._store.save, ended)
        job.batch = ended
        await self._end(job)

    async def _end(self, job: _Job) -> None:
        self._jobs.pop(job.batch.id, None)
        self._ended.add(job.batch.id)
        await self._apart(self._store.give_back, job.batch)

    def _publish(self, job: _Job, batch: Batch) -> dict[str, str]:
        """Makes files of the results. Returns their ids by the fields of the batch.

        A batch that did not come as a file has none: its routes read the results.
        """
        made: dict[str, str] = {}
        if not batch.input_file_id:
            return made
        for part, path in (("output", job.output), ("error", job.errors)):
            if path.exists() and path.stat().st_size:
                name = file_id_of(batch, part)
                file = StoredFile(
                    name, f"{batch.id}_{part}.jsonl", "batch_output", path.stat().st_size, int(time.time())
                )
                self._store.add(batch.tenant, file, path)
                made[f"{part}_file_id"] = name
        return made


def _locked(descriptor: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _counts(job: _Job) -> dict[str, Any]:
    """The numbers of results by kind, as the files have them."""
    codes = Counter((result["error"] or {}).get("code") for result in lines.read_results(job.errors))
    return {
        "completed": sum(1 for _ in lines.read_results(job.output)),
        "failed": codes.total(),
        "cancelled": codes["batch_cancelled"],
        "expired": codes["batch_expired"],
    }


def _seconds_of(answer: Answer) -> float:
    """The time that the server asked for, within bounds."""
    given = answer.headers.get("retry-after", "")
    return min(_LONGEST_WAIT, max(1.0, float(given) if given.isdigit() else 1.0))


def _write_down(job: _Job, path: Path, answered: Sequence[tuple[Line, Answer]]) -> None:
    """Appends results to a file."""
    lines.append(path, [_result(lines.id_of(job.input, line), answer) for line, answer in answered])


def _write_off(job: _Job, code: str, message: str) -> None:
    """Appends an error for each request that waits."""
    lines.append(job.errors, (_unanswered(lines.id_of(job.input, line), code, message) for line in job.waiting))


def _result(custom_id: str, answer: Answer) -> dict[str, Any]:
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    return {
        "id": f"batch_req_{secrets.token_hex(16)}",
        "custom_id": custom_id,
        "response": response,
        "error": None,
    }


def _unanswered(custom_id: str, code: str, message: str) -> dict[str, Any]:
    error = {"code": code, "message": message}
    return {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": custom_id, "response": None, "error": error}
