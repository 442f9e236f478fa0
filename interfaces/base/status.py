"""The closed vocabularies of the system: states of a request, input kinds, batch kinds.

The values are logged and sent over the wire.
"""

from __future__ import annotations

import enum


class GenerationStatus(enum.StrEnum):
    """The state of a request: running, or the reason why it ended."""

    ACTIVE = "active"
    END_OF_SEQUENCE = "end_of_sequence"
    MAXIMUM_LENGTH = "maximum_length"
    CANCELLED = "cancelled"

    @property
    def is_done(self) -> bool:
        return self is not GenerationStatus.ACTIVE


class SchedulerStatus(enum.StrEnum):
    """The state of a request as the scheduler reports it."""

    ACTIVE = "active"
    CANCELLED = "cancelled"
    COMPLETE = "complete"


class InputModality(enum.StrEnum):
    """A kind of input that a model accepts."""

    TEXT = "text"
    IMAGE = "image"
    VIDEO = "video"


class BatchType(enum.Enum):
    """The main work of a batch: context encoding (prefill) or token generation (decode)."""

    CE = "CE"
    TG = "TG"
