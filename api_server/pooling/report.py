"""The report of a one-shot request to observers and the access log: texts, sound and images alike."""

from __future__ import annotations

import time

from api_server import access_log
from api_server.answers.one_shot import OneShot
from api_server.errors import RequestFailed
from api_server.state import ServerState


class Report:
    """Begins with the submission, and ends once: as finished, failed or left."""

    def __init__(self, server: ServerState, shot: OneShot) -> None:
        self.shot = shot
        self._server = server
        self._has_ended = False
        if (entry := access_log.current.get()) is not None:
            entry.shots.append(shot)
        for observer in server.observers:
            observer.texts_submitted(shot)

    def finished(self) -> None:
        """All its values are there."""
        self._has_ended = True
        self.shot.ended = time.monotonic()
        self._server.retry_after.served()
        for observer in self._server.observers:
            observer.texts_pooled(self.shot)

    def failed(self, error: RequestFailed) -> None:
        """It ends with an error, which the endpoint records as well."""
        if self._has_ended:
            return
        self._has_ended = True
        for observer in self._server.observers:
            observer.texts_failed(self.shot, error)

    def left(self) -> None:
        """The client has gone away. Nothing where the request has ended."""
        if self._has_ended:
            return
        self._has_ended = True
        for observer in self._server.observers:
            observer.texts_abandoned(self.shot)
