"""Keeps the library's own lines out of the log: it writes up to four for each batch that is not taken.

Of spans, the first one about a batch becomes the reason in the line that the exporter of spans writes once a minute. Of
metrics, the first one is written, and then at most one a minute.
"""

from __future__ import annotations

import logging
import re
import time

log = logging.getLogger("tokenyard")

# Seconds between two lines about metrics.
SECONDS_BETWEEN_COMPLAINTS = 60.0
# Longest reason in characters; a collector's answer may be a page.
_LONGEST = 500

_EXPORTERS = logging.getLogger("opentelemetry.exporter")
# Says what goes wrong around the exporter of metrics, such as a deadline.
_METRICS = logging.getLogger("opentelemetry.sdk.metrics")
# User and password of a URL.
_CREDENTIALS = re.compile(r"//[^/@\s]*@")
# Keeps Python from writing lines of a logger without handlers to stderr.
_NOWHERE = logging.NullHandler()


class _Taken(logging.Handler):
    """Takes the lines of some loggers from now on, until it is closed."""

    def __init__(self, loggers: tuple[logging.Logger, ...]) -> None:
        super().__init__(logging.WARNING)
        self._loggers = loggers
        for logger in loggers:
            logger.propagate = False
            logger.setLevel(logging.WARNING)
            logger.addHandler(_NOWHERE)
            logger.addHandler(self)

    def close(self) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)
        super().close()


class LibraryLog(_Taken):
    """The lines about spans."""

    def __init__(self) -> None:
        super().__init__((_EXPORTERS,))
        self._first = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self._first and not _is_about_metrics(record):
            self._first = _told(record)

    def take(self) -> str:
        """The first line since the last call, without passwords; empty if there is none."""
        first = self._first
        self._first = ""
        return first


class MetricsLog(_Taken):
    """The lines about metrics."""

    def __init__(self) -> None:
        super().__init__((_EXPORTERS, _METRICS))
        self._complained = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if not _is_about_metrics(record) or now - self._complained < SECONDS_BETWEEN_COMPLAINTS:
            return
        self._complained = now
        log.warning("metrics were not sent: %s", _told(record))


def _is_about_metrics(record: logging.LogRecord) -> bool:
    return "metric" in record.name


def _told(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        text += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
    return _CREDENTIALS.sub("//", text)[:_LONGEST]
