"""What comes back for a request.

Its status, and the envelope in which new tokens travel to the code that waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from interfaces.status import GenerationStatus as GenerationStatus


@dataclass
class SchedulerResult:
    """New tokens of one request since the last result, in order, and whether that was the end.

    `tokens` includes the EOS or stop token that ended the request. `logprobs` is empty, or one float (natural log) a
    token. `cached_tokens` counts prompt tokens that came from the prefix cache. `error` is set when the request
    failed; the status is then CANCELLED.
    """

    status: GenerationStatus = GenerationStatus.ACTIVE
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    error: RequestError | None = None

    @property
    def is_done(self) -> bool:
        return self.status.is_done

    @classmethod
    def failed(cls, error: RequestError) -> SchedulerResult:
        return cls(status=GenerationStatus.CANCELLED, error=error)


@dataclass(frozen=True)
class RequestError:
    """A failure of one request: `code` is an `ErrorCode`, `message` names what was wrong and what to do."""

    code: str
    message: str


class ErrorCode:
    """Reasons for which the scheduler refuses or fails a request; the API maps each to its dialects' statuses."""

    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    TOO_LONG = "too_long"
    INVALID = "invalid"
    FAILED = "failed"
