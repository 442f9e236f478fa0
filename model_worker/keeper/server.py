"""Keeps pieces of a device's memory, and the manifest that says what is in them, for one worker after the other.

Knows no weights: a manifest is bytes, and an identity a name. Pieces that are not sealed when their worker has gone
are freed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from model_worker.keeper.pieces import UNIT, Pieces
from model_worker.keeper.protocol import Answer, Drop, Fetch, Make, Open, Request, Seal, receive, send
from shared import phases

log = logging.getLogger(__name__)
_Got = TypeVar("_Got")


class Keeper:
    """What one keeper has."""

    def __init__(self, make_pieces: Callable[[], Pieces]) -> None:
        """`make_pieces` raises OSError where memory of the device cannot be shared."""
        self._make_pieces = make_pieces
        self._pieces: Pieces | None = None
        self._handles: list[int] = []
        self._identity = ""
        # The descriptor of the manifest; None: the pieces are not sealed.
        self._manifest: int | None = None

    def serve(self, listener: socket.socket) -> None:
        """Talk to workers, one at a time, and beat. Does not return."""
        listener.settimeout(phases.BEAT_SECONDS)
        while True:
            connection, _ = _awaited(listener.accept)
            with connection:
                connection.settimeout(phases.BEAT_SECONDS)
                self.converse(connection)

    def converse(self, connection: socket.socket) -> None:
        """Answer a worker until it hangs up."""
        try:
            while (received := _awaited(lambda: receive(connection, Request))) is not None:
                self._answer(connection, *received)
        except (OSError, ValueError) as error:
            log.warning("a conversation with a worker ends: %s", error)
        if self._manifest is None:
            self._free()

    def _answer(self, connection: socket.socket, request: Any, received: int | None) -> None:
        given: int | None = None
        try:
            answer, given = self._granted(request, received)
        except OSError as error:
            answer = Answer(error.strerror or str(error), able=self._pieces is not None)
        finally:
            if received is not None and received != self._manifest:
                os.close(received)
        try:
            send(connection, answer, given)
        finally:
            if given is not None:
                os.close(given)

    def _granted(self, request: Any, received: int | None) -> tuple[Answer, int | None]:
        """Grant a request. Returns the answer with a descriptor to send and close. OSError says why not."""
        if self._pieces is None:
            self._pieces = self._make_pieces()
        match request:
            case Open(identity):
                return self._opened(identity)
            case Fetch(piece) if self._manifest is not None and 0 <= piece < len(self._handles):
                return Answer(), self._pieces.export(self._handles[piece])
            case Make(size) if self._manifest is None and size > 0 and size % UNIT == 0:
                self._handles.append(self._pieces.make(size))
                return Answer(), self._pieces.export(self._handles[-1])
            case Seal(identity) if self._manifest is None and received is not None:
                self._identity = identity
                self._manifest = received
            case Drop():
                self._free()
            case _:
                return Answer(f"{type(request).__name__} has no place now"), None
        return Answer(), None

    def _opened(self, identity: str) -> tuple[Answer, int | None]:
        if self._manifest is not None and identity == self._identity:
            return Answer(), os.dup(self._manifest)
        had = self._manifest is not None
        self._free()
        return Answer("the weights that were kept are others" if had else "none are kept yet"), None

    def _free(self) -> None:
        for handle in self._handles:
            with contextlib.suppress(OSError):
                assert self._pieces is not None
                self._pieces.free(handle)
        self._handles.clear()
        if self._manifest is not None:
            os.close(self._manifest)
        self._manifest = None
        self._identity = ""


def _awaited(get: Callable[[], _Got]) -> _Got:
    """Return what `get` gives, and beat whenever it raises TimeoutError: a worker is silent while it moves weights."""
    while True:
        phases.beat()
        with contextlib.suppress(TimeoutError):
            return get()
