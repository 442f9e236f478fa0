"""What comes back for a request: an output in an envelope that says whether more will follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from interfaces.base.status import GenerationStatus, SchedulerStatus

__all__ = ["ErrorCode", "GenerationStatus", "RequestError", "SchedulerResult", "SchedulerStatus"]


@runtime_checkable
class PipelineOutput(Protocol):
    """What a pipeline says of one request."""

    @property
    def is_done(self) -> bool:
        """Whether this was the request's last output."""
        ...


PipelineOutputType = TypeVar("PipelineOutputType", bound=PipelineOutput)


@dataclass(slots=True)
class SchedulerResult(Generic[PipelineOutputType]):
    """News of one request: `result` is what its pipeline said since the last news, if anything.

    `error` is set when the request failed; the status is then CANCELLED, and no more news follow.
    """

    status: SchedulerStatus
    result: PipelineOutputType | None
    error: RequestError | None = None

    @property
    def is_done(self) -> bool:
        """Whether this was the last news."""
        return self.status is not SchedulerStatus.ACTIVE

    @property
    def stop_stream(self) -> bool:
        return self.is_done

    @classmethod
    def active(cls, result: PipelineOutputType) -> Self:
        """More will follow."""
        return cls(SchedulerStatus.ACTIVE, result)

    @classmethod
    def complete(cls, result: PipelineOutputType) -> Self:
        """The last output."""
        return cls(SchedulerStatus.COMPLETE, result)

    @classmethod
    def create(cls, result: PipelineOutputType) -> Self:
        """Active or complete, as the output says."""
        return cls(SchedulerStatus.COMPLETE if result.is_done else SchedulerStatus.ACTIVE, result)

    @classmethod
    def cancelled(cls) -> Self:
        """Nobody waits any more."""
        return cls(SchedulerStatus.CANCELLED, None)

    @classmethod
    def failed(cls, error: RequestError) -> Self:
        """The request ended with an error of its own."""
        return cls(SchedulerStatus.CANCELLED, None, error)


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
    TIMEOUT = "timeout"
