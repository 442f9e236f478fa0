"""Asks the helper process to compile a constraint, once for each content, and never waits for it on the loop.

Knows the helper's protocol and lifecycle: it starts at first use (or by `start`), and again when it has died. The
helper knows the meaning of constraints.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Callable, Sequence

from api_server.constraints.limits import MOST_PATTERN, MOST_SOURCE
from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed, invalid
from interfaces import Constraint, ConstraintKind
from shared.liveness import SUPERVISOR_PID
from shared.pipe_messages import end_process, message_unpacker, send_message

log = logging.getLogger("tokenyard")

# Limit on compiled grammars and refusals together.
CACHED_BYTES = 64 << 20
# Most constraints that are being compiled or wait for it.
MOST_WAITING = 256
# Processes that may die of one constraint.
_ATTEMPTS = 2

# The fields `grammar`, perhaps with `ignored`, or `error`.
Outcome = dict[str, str]


class _ProcessLost(Exception):
    """The helper died before it answered."""


class ConstraintCompiler:
    """Compiles through the helper.

    One per API process. `vocabulary`, called in a thread, gives the tokenizer's JSON and its end tokens.
    """

    def __init__(self, vocabulary: Callable[[], tuple[str, Sequence[int]]]) -> None:
        self._vocabulary = vocabulary
        self._known: OrderedDict[bytes, Outcome] = OrderedDict()
        self._known_bytes = 0
        self._asked: dict[bytes, asyncio.Future[Outcome]] = {}
        self._by_number: dict[int, bytes] = {}
        self._number = 0
        self._process: Process | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None

    async def compile(self, constraint: Constraint) -> str:
        """The compiled grammar. Raises RequestFailed(INVALID), which names the client's field."""
        check_size(constraint)
        key = hashlib.blake2b(f"{constraint.kind}\0{constraint.source}".encode(), digest_size=16).digest()
        outcome = self._known.get(key)
        if outcome is None:
            outcome = await self._ask_twice(key, constraint)
            if "ignored" in outcome:
                log.warning("%s: ignored, because it restricts nothing: %s", constraint.field, outcome["ignored"])
        else:
            self._known.move_to_end(key)
        if "grammar" not in outcome:
            raise refused(constraint, outcome["error"])
        return outcome["grammar"]

    async def start(self) -> None:
        """Starts the helper, so that the first constraint need not wait for it."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._run())
        await asyncio.shield(self._starting)

    async def close(self) -> None:
        """Ends the helper."""
        process = self._process
        self._process = None
        if process is not None and process.returncode is None:
            process.kill()
        if self._reading is not None:
            await self._reading

    async def _ask_twice(self, key: bytes, constraint: Constraint) -> Outcome:
        """Ask the helper, once more if it has died."""
        for _ in range(_ATTEMPTS):
            try:
                return await self._ask(key, constraint)
            except _ProcessLost:
                continue
        text = "the process that compiles constraints has died; retry"
        raise RequestFailed(ErrorKind.UNAVAILABLE, text, retry_after=RETRY_AFTER_SECONDS)

    async def _ask(self, key: bytes, constraint: Constraint) -> Outcome:
        found = self._asked.get(key)
        if found is None:
            if len(self._asked) >= MOST_WAITING:
                raise RequestFailed(
                    ErrorKind.OVERLOADED,
                    f"{len(self._asked)} constraints wait to be compiled; retry later",
                    retry_after=RETRY_AFTER_SECONDS,
                )
            found = self._asked[key] = asyncio.get_running_loop().create_future()
            # A task of its own: when the client goes away, others may wait for the same answer.
            task = asyncio.create_task(self._send(key, constraint))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return await asyncio.shield(found)

    async def _send(self, key: bytes, constraint: Constraint) -> None:
        process = reading = None
        try:
            await self.start()
            process, reading = self._process, self._reading
            if process is None:
                raise BrokenPipeError("it has ended")
            self._number += 1
            self._by_number[self._number] = key
            await send_message(process, [self._number, constraint.kind.value, constraint.source])
        except OSError as error:
            log.error("the process that compiles constraints cannot be reached: %s", error)
            if process is not None and reading is not None:
                await end_process(process, reading)
            elif self._process is None:
                self._starting = None
            self._answer(key, None)

    async def _run(self) -> None:
        tokenizer, eos = await asyncio.to_thread(self._vocabulary)
        command = [sys.executable, "-m", "api_server.constraints.compile_process"]
        environment = {**os.environ, SUPERVISOR_PID: str(os.getpid())}
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)
        self._reading = asyncio.create_task(self._read(self._process))
        await send_message(self._process, [tokenizer, list(eos)])

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        unpacker = message_unpacker()
        while data := await process.stdout.read(1 << 20):
            unpacker.feed(data)
            for number, outcome in unpacker:
                self._answer(self._by_number.pop(number), outcome)
        await process.wait()
        if self._process is process:
            log.error(
                "the process that compiles constraints ended with %s; the next one will start it", process.returncode
            )
        self._process = self._starting = None
        for key in list(self._asked):
            self._answer(key, None)
        self._by_number.clear()

    def _answer(self, key: bytes, outcome: Outcome | None) -> None:
        future = self._asked.pop(key, None)
        if future is None or future.done():
            return
        if outcome is None:
            future.set_exception(_ProcessLost())
            future.exception()  # marks it as retrieved: perhaps no waiter is left
            return
        future.set_result(outcome)
        self._known[key] = outcome
        self._known_bytes += _size(outcome)
        while self._known_bytes > CACHED_BYTES:
            self._known_bytes -= _size(self._known.popitem(last=False)[1])


def check_size(constraint: Constraint) -> None:
    """Raises RequestFailed(INVALID) for a constraint that is too long to be compiled."""
    # Checked here, and in the helper again, so that a constraint that is too long is not sent.
    most = MOST_PATTERN if constraint.kind is ConstraintKind.REGEX else MOST_SOURCE
    if len(constraint.source) > most:
        raise refused(constraint, f"it has {len(constraint.source)} characters; at most {most} are possible")


def refused(constraint: Constraint, why: str) -> RequestFailed:
    """The client's error for a constraint that cannot be enforced."""
    field = constraint.field or constraint.kind.value
    return invalid(f"{field} cannot be enforced: {why}", field)


def _size(outcome: Outcome) -> int:
    return 100 + sum(map(len, outcome.values()))
