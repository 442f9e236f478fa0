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
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

FORMATS = ("text", "json")
_ROUTINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING) ")
_TROUBLE = ("error", "critical")

# Facts of the request that is being served: request_id, and trace_id where the client has one.
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
        # In a text the request's id is in the message, where it matters.
        if "trace_id" in around:
            facts["trace_id"] = around["trace_id"]
        first = line("text", record.created, record.levelname, self._role, record.getMessage(), facts)
        return "\n".join(part for part in (first, self._trouble(record)) if part)

    def _trouble(self, record: logging.LogRecord) -> str:
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        return "\n".join(part for part in (traceback, stack) if part)
