"""The link of a worker to a scheduler on another machine: the worker's name, its registration, and its silence.

A connection that breaks may have lost messages, so the worker asks for a new epoch then; its weights stay as they are.
A scheduler shows itself twice a second. When it is not heard, the worker frees nothing and keeps trying.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from interfaces import UNREGISTERED, Welcome, WorkerHello

log = logging.getLogger(__name__)

# Seconds of silence that are logged.
SILENCE_SECONDS = 5.0
SECONDS_BETWEEN_WARNINGS = 60.0
_ANY_INDEX = -1


class Refused(Exception):
    """The scheduler does not take this worker; a restart would not help."""


class SchedulerLink:
    """Knows what was heard, and when. `index_file` keeps the index over restarts of this process."""

    def __init__(self, endpoint: str, index_file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoint = endpoint
        self.name = secrets.token_hex(8)
        self._index_file = index_file
        self._clock = clock
        self._heard = clock()
        self._warned: float | None = None
        # When it was logged last that the scheduler's other workers serve something else.
        self._refusal_logged: float | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        # The index that the operator wants, or the scheduler gave.
        self._wanted: int | None = None
        # Whether the operator wants it, and so no other.
        self._demanded = False
        self._registered = False

    def watch(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Watch the connection of `socket`. Returns a socket that is readable when it breaks."""
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        return self._monitor

    def is_broken(self, events: Mapping[Any, int]) -> bool:
        """Whether the connection of a registered worker has broken since the last call."""
        if self._monitor is None or self._monitor not in events:
            return False
        with contextlib.suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
        if not self._registered:
            # An attempt that failed: nothing can be lost.
            return False
        log.warning("the connection to the scheduler at %s is broken: it is made again", self.endpoint)
        return True

    def unregistered(self, hello: WorkerHello) -> WorkerHello:
        """The hello that asks for an index and an epoch."""
        self._registered = False
        if self._wanted is None:
            self._demanded = hello.index >= 0
            self._wanted = hello.index if self._demanded else self._kept_index()
        return replace(hello, name=self.name, index=self._wanted, epoch=UNREGISTERED)

    def registered(self, hello: WorkerHello, welcome: Welcome) -> WorkerHello:
        """The hello under what the scheduler gave. Refused where the operator wants the index of a local worker."""
        if self._demanded and welcome.index != self._wanted:
            raise Refused(
                f"--index {self._wanted} is that of a worker of the server's own machine; {welcome.index} is free, "
                "or leave --index out"
            )
        self._registered = True
        self._wanted = welcome.index
        if self._index_file is not None:
            with contextlib.suppress(OSError):  # another index does as well
                self._index_file.write_text(str(welcome.index))
        log.info("the scheduler at %s gave this worker index %d", self.endpoint, welcome.index)
        return replace(hello, index=welcome.index, epoch=welcome.epoch)

    def refused_for_now(self, reason: str) -> None:
        """Note that this worker is refused as long as the others are there: it goes on asking."""
        now = self._clock()
        if self._refusal_logged is None or now - self._refusal_logged > SECONDS_BETWEEN_WARNINGS:
            self._refusal_logged = now
            log.warning("the scheduler at %s refuses this worker until the others go: %s", self.endpoint, reason)

    def note(self, heard: bool) -> None:
        """Note whether a message was there, when it was looked for."""
        now = self._clock()
        if heard:
            if self._warned is not None:
                log.info("the scheduler at %s is heard again after %.0f s", self.endpoint, now - self._heard)
            self._heard = now
            self._warned = None
            return
        silent = now - self._heard
        if silent > SILENCE_SECONDS and (self._warned is None or now - self._warned > SECONDS_BETWEEN_WARNINGS):
            self._warned = now
            log.warning("no scheduler: nothing was heard from %s for %.0f s; it keeps trying", self.endpoint, silent)

    def _kept_index(self) -> int:
        if self._index_file is None:
            return _ANY_INDEX
        try:
            return int(self._index_file.read_text())
        except (OSError, ValueError):
            return _ANY_INDEX
