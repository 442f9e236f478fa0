"""Why a request gets no answer: one error with a kind, which each dialect maps to its own status and body.

Knows no HTTP status and no dialect.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Mapping

from interfaces import ErrorCode, RequestError


class ErrorKind(enum.StrEnum):
    """What went wrong, from the client's point of view."""

    BAD_JSON = "bad_json"
    """The body is no JSON object."""
    BAD_MEDIA_TYPE = "bad_media_type"
    """The request's header says that the body is no JSON."""
    BODY_TOO_LARGE = "body_too_large"
    INVALID = "invalid"
    """A value is missing, of the wrong type or out of range; `field` names it."""
    UNSUPPORTED = "unsupported"
    """A known field asks for what this server cannot do; `field` names it."""
    TOO_LONG = "too_long"
    """Prompt (plus answer) exceed the context; `numbers` has prompt_tokens, max_new_tokens (if given) and limit."""
    TEMPLATE = "template"
    """The chat template is missing or refuses the messages."""
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNAUTHORIZED = "unauthorized"
    """No key, or one that opens nothing."""
    FORBIDDEN = "forbidden"
    """The caller may not do this, whoever it is."""
    OVERLOADED = "overloaded"
    """Queues are full: the client should come back after `retry_after` seconds."""
    UNAVAILABLE = "unavailable"
    """Nobody can serve now (starting, restarting, draining)."""
    TIMEOUT = "timeout"
    """The time limit that the request itself named has passed."""
    GENERATION_FAILED = "generation_failed"
    """The model failed on this request."""
    INTERNAL = "internal"
    """A bug of ours; the log has the traceback under the request id."""


LONGEST_MESSAGE = 2000
"""Characters; a value of the client's that is quoted may have millions."""


class RequestFailed(Exception):
    """The request ends here. `message` is written for the client: it names the field, the value and the remedy.

    The middle of a message that is too long goes.
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
        self.counted = counted
        """Whether observers know already how its answers ended: as cancelled, say."""

    def renamed(self, names: Mapping[str, str]) -> RequestFailed:
        """The same failure in the words of a dialect that calls a field by another name than the common path."""
        name = names.get(self.field or "")
        if self.field is None or name is None:
            return self
        message = self.message.replace(self.field, name)
        return RequestFailed(self.kind, message, field=name, retry_after=self.retry_after, numbers=self.numbers)


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
    """The scheduler's refusal in the API's terms. When to come again if its line is full, `retry_after.py` says."""
    kind = _KIND_OF_CODE.get(error.code, ErrorKind.GENERATION_FAILED)
    retry = RETRY_AFTER_SECONDS if kind is ErrorKind.UNAVAILABLE else None
    return RequestFailed(kind, error.message, retry_after=retry)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 10


def shown(value: object) -> str:
    """A value of the client's as an error quotes it: its beginning, for what that costs."""
    text = _SHORT.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def invalid(message: str, field: str | None = None) -> RequestFailed:
    """A value of the request that cannot be used."""
    return RequestFailed(ErrorKind.INVALID, message, field=field)


def unsupported(field: str, what: str) -> RequestFailed:
    """A known field that asks for something this server does not do."""
    return RequestFailed(ErrorKind.UNSUPPORTED, f"{field}: {what} is not supported by this server", field=field)
