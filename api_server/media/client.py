"""Asks the media process, and never waits for it on the loop.

Knows the process's protocol and lifecycle: it starts at first use (or by `start`), and again when it has died. The
media process knows images and sound.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from api_server.errors import ErrorKind, RequestFailed
from api_server.media.protocol import SOUND_FIELDS, Answer, Start
from shared.liveness import SUPERVISOR_PID
from shared.pipe_messages import end_process, message_unpacker, send_message

log = logging.getLogger("tokenyard")


class ProcessLost(Exception):
    """The media process died before it answered."""


class MediaClient:
    """The API process's end of the media process. One per API process."""

    def __init__(self, start: Start) -> None:
        self._first = start
        self._what = "sound" if SOUND_FIELDS & start.keys() else "images"
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._number = 0
        self._process: Process | None = None
        self._facts: asyncio.Future[dict[str, Any]] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    async def facts(self) -> dict[str, Any]:
        """Facts of the model's image processor. Raises ProcessLost, and RequestFailed when there is no processor."""
        await self.start()
        assert self._facts is not None
        facts = await asyncio.shield(self._facts)
        if "error" in facts:
            raise RequestFailed(
                ErrorKind.UNSUPPORTED, f"this model takes no {self._what} on this server: {facts['error']}"
            )
        return facts

    async def start(self) -> None:
        """Starts the process, so that the first image need not wait for it."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._run())
        starting = self._starting
        try:
            await asyncio.shield(starting)
        except OSError as error:
            log.error("the process that reads %s cannot be started: %s", self._what, error)
            if self._starting is starting:
                self._starting = None
            raise ProcessLost from None

    async def ask(self, job: dict[str, Any]) -> Answer:
        """The results of a job. Raises ProcessLost."""
        await self.facts()
        process = self._process
        reading = self._reading
        if process is None or reading is None:
            raise ProcessLost
        self._number += 1
        number = self._number
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await send_message(process, job | {"number": number})
            found: Answer = await answer
            return found
        except OSError:
            await end_process(process, reading)
            raise ProcessLost from None
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        """Ends the process."""
        self._closed = True
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
        if self._reading is not None:
            await self._reading

    @property
    def pid(self) -> int | None:
        """The id of the running process."""
        return None if self._process is None else self._process.pid

    async def _run(self) -> None:
        if self._closed:
            raise ProcessLost
        command = [sys.executable, "-m", "api_server.media.media_process"]
        environment = {**os.environ, SUPERVISOR_PID: str(os.getpid())}
        self._facts = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)
        self._reading = asyncio.create_task(self._read(self._process, self._facts))
        await send_message(self._process, self._first)

    async def _read(self, process: Process, facts: asyncio.Future[dict[str, Any]]) -> None:
        assert process.stdout is not None
        unpacker = message_unpacker()
        while data := await process.stdout.read(1 << 20):
            unpacker.feed(data)
            for message in unpacker:
                if facts.done():
                    self._answer(message)
                else:
                    facts.set_result(message)
        await process.wait()
        has_no_processor = facts.done() and "error" in facts.result()
        if has_no_processor:
            return  # it would end again
        if not self._closed:
            log.error(
                "the process that reads %s ended with %s; the next file will start it", self._what, process.returncode
            )
        self._process = self._starting = None
        futures: list[asyncio.Future[Any]] = [facts, *self._asked.values()]
        for future in futures:
            if not future.done():
                future.set_exception(ProcessLost())
                future.exception()  # marks it as retrieved: perhaps no waiter is left
        self._asked.clear()

    def _answer(self, answer: Answer) -> None:
        future = self._asked.pop(answer["number"], None)
        if future is not None and not future.done():
            future.set_result(answer)
