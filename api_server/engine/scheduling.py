"""Scheduling options of a request, in every dialect: time limits, priority, isolation.

These fields, in headers or in the body, say when and how a request runs, not what it asks for. They are removed from a
body before its dialect reads it, so that no dialect needs to know them. Code that submits reads them from `current`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from starlette.datastructures import Headers

from api_server import trace_context
from api_server.errors import ErrorKind, RequestFailed, invalid
from interfaces import SchedulingOptions
from shared.access_keys import Caller

LONGEST_SECONDS = 86_400.0
HIGHEST_PRIORITY = 1000

_ORDINARY = SchedulingOptions()
# The scheduling options of the current HTTP request.
current: ContextVar[SchedulingOptions] = ContextVar("scheduling", default=_ORDINARY)

_HEADERS = {
    "timeout": "x-request-timeout",
    "queue_timeout": "x-queue-timeout",
    "priority": "x-request-priority",
    "deterministic": "x-deterministic",
}
# The names of the options in a body.
FIELDS = tuple(_HEADERS)
_SWITCH = {"true": True, "1": True, "false": False, "0": False}


def take(body: dict[str, Any]) -> dict[str, Any]:
    """Removes the scheduling options from a body and returns them."""
    return {name: body.pop(name) for name in _HEADERS if name in body}


def of_texts(text: Callable[[str], str | None]) -> dict[str, Any]:
    """The scheduling options among the fields of a form, of which `text` gives the values."""
    found: dict[str, Any] = {name: value for name in _HEADERS if (value := text(name)) is not None}
    switch = found.get("deterministic")
    return found if switch is None else found | {"deterministic": _SWITCH.get(switch.strip().lower(), switch)}


def options_of(headers: Headers, fields: Mapping[str, Any], caller: Caller, may_hurry: bool) -> SchedulingOptions:
    """Reads scheduling options; fields of the body win over headers.

    Raises RequestFailed(INVALID) that names the field or header.
    """
    span = trace_context.current.get()
    return SchedulingOptions(
        tenant=caller.name,
        weight=caller.weight,
        priority=_priority(headers, fields, may_hurry),
        queue_seconds=_seconds("queue_timeout", headers, fields),
        total_seconds=_seconds("timeout", headers, fields),
        deterministic=_deterministic(headers, fields),
        trace_id="" if span is None else span.trace_id,
        span_id=span.span_id if span is not None and span.made_here and span.sampled else "",
    )


@asynccontextmanager
async def spending(what: str = "its documents") -> AsyncIterator[None]:
    """Counts the time that `what` takes before submission against the request's limit.

    Raises RequestFailed(TIMEOUT).
    """
    given = current.get()
    start = time.monotonic()
    total = given.total_seconds
    try:
        async with asyncio.timeout(total):
            yield
    except TimeoutError:
        message = f"the request has not ended within its time limit of {total:g} s: {what} took that long"
        raise RequestFailed(ErrorKind.TIMEOUT, message) from None
    if total is not None:
        current.set(replace(given, total_seconds=max(0.0, total - (time.monotonic() - start))))


def _seconds(name: str, headers: Headers, fields: Mapping[str, Any]) -> float | None:
    where, value = _found(name, headers, fields)
    if value is None:
        return None
    seconds = _number(value)
    if seconds is None or not 0 < seconds <= LONGEST_SECONDS:
        raise invalid(
            f"{where} must be a number of seconds above 0 and up to {LONGEST_SECONDS:g}, got {value!r}", where
        )
    return seconds


def _priority(headers: Headers, fields: Mapping[str, Any], may_hurry: bool) -> int:
    where, value = _found("priority", headers, fields)
    if value is None:
        return 0
    number = _number(value)
    if number is None or number != int(number) or abs(number) > HIGHEST_PRIORITY:
        raise invalid(
            f"{where} must be a whole number from {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}, got {value!r}", where
        )
    if number > 0 and not may_hurry:
        raise invalid(
            f"{where} above 0 puts a request before other keys' and needs the admin key, got {value!r}", where
        )
    return int(number)


def _deterministic(headers: Headers, fields: Mapping[str, Any]) -> bool:
    where, value = _found("deterministic", headers, fields)
    if value is None or isinstance(value, bool):
        return bool(value)
    found = _SWITCH.get(value.lower()) if where not in fields and isinstance(value, str) else None
    if found is None:
        raise invalid(f"{where} must be true or false, got {value!r:.100}", where)
    return found


def _found(name: str, headers: Headers, fields: Mapping[str, Any]) -> tuple[str, Any]:
    """The name that the client uses for an option, and its value; None when it was left out."""
    if fields.get(name) is not None:
        return name, fields[name]
    text = headers.get(_HEADERS[name])
    return _HEADERS[name], None if text is None else text[:100]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
