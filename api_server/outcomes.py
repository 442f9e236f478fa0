"""The outcome of a request, in one word for metrics and the access log."""

from __future__ import annotations

from api_server.errors import ErrorKind


class Outcome:
    """Values of the label `outcome`."""

    OK = "ok"
    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    CANCELLED = "cancelled"


_OF_KIND = {
    ErrorKind.UNAUTHORIZED: Outcome.UNAUTHORIZED,
    ErrorKind.FORBIDDEN: Outcome.UNAUTHORIZED,
    ErrorKind.OVERLOADED: Outcome.OVERLOADED,
    ErrorKind.RATE_LIMITED: Outcome.RATE_LIMITED,
    ErrorKind.UNAVAILABLE: Outcome.UNAVAILABLE,
    ErrorKind.GENERATION_FAILED: Outcome.FAILED,
    ErrorKind.INTERNAL: Outcome.FAILED,
}


def outcome_of(kind: ErrorKind) -> str:
    return _OF_KIND.get(kind, Outcome.INVALID)
