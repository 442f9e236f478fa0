"""Errors of requests: one exception with a kind, which each dialect maps to its own status and body.

Knows no HTTP status and no dialect.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Mapping

from interfaces import ErrorCode, RequestError


class ErrorKind(enum.StrEnum):
    """The kind of a failure, from the client's point of view."""

    # The body is not a JSON object.
    BAD_JSON = "bad_json"
    # The request's header says that the body is not JSON.
    BAD_MEDIA_TYPE = "bad_media_type"
    BODY_TOO_LARGE = "body_too_large"
    # A value is missing, of the wrong type or out of range; `field` names it.
    INVALID = "invalid"
    # A known field asks for something that this server cannot do; `field` names it.
    UNSUPPORTED = "unsupported"
    # Prompt (plus answer) exceed the context; `numbers` has prompt_tokens, max_new_tokens (if given) and limit.
    TOO_LONG = "too_long"
    # The chat template is missing or refuses the messages.
    TEMPLATE = "template"
    MODEL_NOT_FOUND = "model_not_found"
    # The route needs a model with another task than the one that is served.
    WRONG_TASK = "wrong_task"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    # No key, or one that opens nothing.
    UNAUTHORIZED = "unauthorized"
    # No caller with these rights may do this.
    FORBIDDEN = "forbidden"
    # Queues are full: the client should come back after `retry_after` seconds.
    OVERLOADED = "overloaded"
    # The key has used what it may have in a minute: the client should come back after `retry_after` seconds.
    RATE_LIMITED = "rate_limited"
    # The server cannot serve now (starting, restarting, draining).
    UNAVAILABLE = "unavailable"
    # The time limit that the request itself named has passed.
    TIMEOUT = "timeout"
    # The model failed on this request.
    GENERATION_FAILED = "generation_failed"
    # A bug of ours; the log has the traceback under the request id.
    INTERNAL = "internal"


# Longest message in characters; a quoted value of the client's may have millions.
LONGEST_MESSAGE = 2000


class RequestFailed(Exception):
    """Ends the request. `message` is written for the client: it names the field, the value and the remedy.

    A message that is too long loses its middle.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        field: str | None = None,
        retry_after: int | None = None,
        numbers: Mapping[str, int] | None = None,
        counted: bool = False,
    ) -> None:
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.numbers = dict(numbers or {})
        # True when observers already know how its answers ended: as cancelled, say.
        self.counted = counted

    def renamed(self, names: Mapping[str, str]) -> RequestFailed:
        """This failure with a dialect's names for the fields."""
        name = names.get(self.field or "")
        if self.field is None or name is None:
            return self
        # Messages name their field once and first; what follows may have the word in a value.
        message = self.message.replace(self.field, name, 1)
        return RequestFailed(
            self.kind,
            message,
            field=name,
            retry_after=self.retry_after,
            numbers=self.numbers,
            counted=self.counted,
        )


_KIND_OF_CODE = {
    ErrorCode.OVERLOADED: ErrorKind.OVERLOADED,
    ErrorCode.UNAVAILABLE: ErrorKind.UNAVAILABLE,
    ErrorCode.TOO_LONG: ErrorKind.TOO_LONG,
    ErrorCode.INVALID: ErrorKind.INVALID,
    ErrorCode.FAILED: ErrorKind.GENERATION_FAILED,
    ErrorCode.TIMEOUT: ErrorKind.TIMEOUT,
}

RETRY_AFTER_SECONDS = 1


def from_scheduler(error: RequestError) -> RequestFailed:
    """The scheduler's refusal as an API error. For a full queue `retry_after.py` sets the delay."""
    kind = _KIND_OF_CODE.get(error.code, ErrorKind.GENERATION_FAILED)
    retry = RETRY_AFTER_SECONDS if kind is ErrorKind.UNAVAILABLE else None
    return RequestFailed(kind, error.message, retry_after=retry)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 10


def shown(value: object) -> str:
    """The beginning of a client's value for an error message; long values cost no more."""
    text = _SHORT.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def invalid(message: str, field: str | None = None) -> RequestFailed:
    """The error for a value of the request that cannot be used."""
    return RequestFailed(ErrorKind.INVALID, message, field=field)


def unsupported(field: str, what: str) -> RequestFailed:
    """The error for a known field that asks for something that this server does not do."""
    return RequestFailed(ErrorKind.UNSUPPORTED, f"{field}: {what} is not supported by this server", field=field)
