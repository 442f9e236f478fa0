"""One log format for all processes: time (UTC), level, role, message, as a line of text or of JSON.

A record may carry facts beside its message: `log.info("...", extra={"facts": {"status": 200}})`, or for all records of
one request, `of_request`. Nothing that a client sends ends a line: control characters are written as escapes.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

FORMATS = ("text", "json")
_ROUTINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING) ")
_TROUBLE = ("error", "critical")

# Ids of the request that a line is about: request_id; trace_id where it belongs to a trace; span_id where its span is
# made in this process.
of_request: ContextVar[Mapping[str, str] | None] = ContextVar("of_request", default=None)

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}
_CHATTY = ("httpx", "httpx2", "httpcore2", "numba", "urllib3", "filelock", "huggingface_hub")


def configure(role: str, level: str, form: str = "text") -> logging.Logger:
    """Set up the root logger of this process; `role` (api_server:0, scheduler, model_worker:cpu) is in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(role, form))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return logging.getLogger("tokenyard")


@contextmanager
def about(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Give the lines inside the ids of a request, for code that serves many at once."""
    before = of_request.set({"request_id": request_id, **({"trace_id": trace_id} if trace_id else {})})
    try:
        yield
    finally:
        of_request.reset(before)


def utc(seconds: float) -> str:
    """Format Unix time as RFC 3339 with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


def line(form: str, seconds: float, level: str, role: str, message: str, facts: Mapping[str, Any]) -> str:
    """Format one record, without its line end."""
    if form == "json":
        record = {"time": utc(seconds), "level": level.lower(), "role": role, "message": message, **facts}
        return json.dumps(record, default=str)
    beside = "".join(f" {name}={value}" for name, value in facts.items())
    return f"{utc(seconds)} {level:<7} {role}: {(message + beside).translate(_CONTROL)}"


def trouble_in(written: str) -> str:
    """Find an error in a line of another process's output, whether it is a log record or not; empty if there is
    none."""
    record = _record(written)
    if record is None:
        return "" if _ROUTINE.match(written) else written.strip()
    if record.get("level") not in _TROUBLE:
        return ""
    exception = str(record.get("exception", "")).strip().rpartition("\n")[2]
    return f"ERROR {record.get('message')}" + (f": {exception}" if exception else "")


def is_record(written: str) -> bool:
    """Whether a line is a JSON record as `line` makes them."""
    return _record(written) is not None


def _record(written: str) -> dict[str, Any] | None:
    if not written.startswith('{"time": '):
        return None
    try:
        found = json.loads(written)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


class _Formatter(logging.Formatter):
    def __init__(self, role: str, form: str) -> None:
        super().__init__()
        self._role = role
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = dict(getattr(record, "facts", ()))
        around = of_request.get() or {}
        if self._form == "json":
            facts = {**around, **facts}
            trouble = self._trouble(record)
            facts |= {"exception": trouble} if trouble else {}
            return line("json", record.created, record.levelname, self._role, record.getMessage(), facts)
        message = record.getMessage()
        # Most messages about a request have its id.
        named = {name: around[name] for name in ("request_id", "trace_id") if name in around}
        facts |= {name: value for name, value in named.items() if name not in facts and value not in message}
        first = line("text", record.created, record.levelname, self._role, message, facts)
        return "\n".join(part for part in (first, self._trouble(record)) if part)

    def _trouble(self, record: logging.LogRecord) -> str:
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        return "\n".join(part for part in (traceback, stack) if part)
