"""The closed vocabularies of the system: states of a request, input kinds, batch kinds.

Values are what travels and what is logged.
"""

from __future__ import annotations

import enum


class GenerationStatus(enum.StrEnum):
    """Why a request is still running, or why it ended."""

    ACTIVE = "active"
    END_OF_SEQUENCE = "end_of_sequence"
    MAXIMUM_LENGTH = "maximum_length"
    CANCELLED = "cancelled"

    @property
    def is_done(self) -> bool:
        return self is not GenerationStatus.ACTIVE


class SchedulerStatus(enum.StrEnum):
    """A request as the scheduler reports it."""

    ACTIVE = "active"
    CANCELLED = "cancelled"
    COMPLETE = "complete"


class InputModality(enum.StrEnum):
    """What a model accepts."""

    TEXT = "text"
    IMAGE = "image"
    VIDEO = "video"


class BatchType(enum.Enum):
    """What a batch mostly does: context encoding (prefill) or token generation (decode)."""

    CE = "CE"
    TG = "TG"
