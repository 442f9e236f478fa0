"""Keeps the exporter library's own lines out of the log: it writes up to four for each batch that is not taken.

The first one about a batch becomes the reason in the line that this server writes once a minute.
"""

from __future__ import annotations

import logging
import re

_LOGGER = logging.getLogger("opentelemetry.exporter")
# User and password of a URL.
_CREDENTIALS = re.compile(r"//[^/@\s]*@")
# Keeps Python from writing lines of a logger without handlers to stderr.
_NOWHERE = logging.NullHandler()


class LibraryLog(logging.Handler):
    """Takes the library's lines from now on, until it is closed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._first = ""
        _LOGGER.propagate = False
        _LOGGER.setLevel(logging.WARNING)
        _LOGGER.addHandler(_NOWHERE)
        _LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if not self._first:
            self._first = _CREDENTIALS.sub("//", record.getMessage())

    def take(self) -> str:
        """The first line since the last call, without passwords; empty if there is none."""
        first = self._first
        self._first = ""
        return first

    def close(self) -> None:
        _LOGGER.removeHandler(self)
        super().close()
