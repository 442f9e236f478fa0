"""The result of a request: an output in an envelope that says whether more will follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from interfaces.base.status import GenerationStatus, SchedulerStatus

__all__ = ["ErrorCode", "GenerationStatus", "RequestError", "SchedulerResult", "SchedulerStatus"]


@runtime_checkable
class PipelineOutput(Protocol):
    """A pipeline's output for one request."""

    @property
    def is_done(self) -> bool:
        """Whether this was the request's last output."""
        ...


PipelineOutputType = TypeVar("PipelineOutputType", bound=PipelineOutput)


@dataclass(slots=True)
class SchedulerResult(Generic[PipelineOutputType]):
    """An update of one request: `result` is its pipeline's output since the last update, if any.

    `error` is set when the request failed; the status is then CANCELLED, and no more updates follow.
    """

    status: SchedulerStatus
    result: PipelineOutputType | None
    error: RequestError | None = None

    @property
    def is_done(self) -> bool:
        """Whether this was the last update."""
        return self.status is not SchedulerStatus.ACTIVE

    @property
    def stop_stream(self) -> bool:
        return self.is_done

    @classmethod
    def active(cls, result: PipelineOutputType) -> Self:
        """Wrap an output that more will follow."""
        return cls(SchedulerStatus.ACTIVE, result)

    @classmethod
    def complete(cls, result: PipelineOutputType) -> Self:
        """Wrap the last output."""
        return cls(SchedulerStatus.COMPLETE, result)

    @classmethod
    def create(cls, result: PipelineOutputType) -> Self:
        """Wrap an output, active or complete as the output says."""
        return cls(SchedulerStatus.COMPLETE if result.is_done else SchedulerStatus.ACTIVE, result)

    @classmethod
    def cancelled(cls) -> Self:
        """Make the update of a request that was cancelled: its client does not wait any more."""
        return cls(SchedulerStatus.CANCELLED, None)

    @classmethod
    def failed(cls, error: RequestError) -> Self:
        """Make the update of a request that ended with an error of its own."""
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
