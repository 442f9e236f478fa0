"""The closed vocabularies of the system: states of a request, tasks, input kinds, batch kinds.

Values are what travels and what is logged. The types a task answers with are named here but live elsewhere.
"""

from __future__ import annotations

import enum
from types import GenericAlias
from typing import Any


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


class PipelineTask(enum.StrEnum):
    """What a pipeline makes."""

    TEXT_GENERATION = "text_generation"
    EMBEDDINGS_GENERATION = "embeddings_generation"
    AUDIO_GENERATION = "audio_generation"
    SPEECH_TOKEN_GENERATION = "speech_token_generation"
    PIXEL_GENERATION = "pixel_generation"
    UNDEFINED = "undefined"

    @property
    def output_type(self) -> Any:
        """The type to decode a scheduler's answers with: results by request id. ValueError for a task without one."""
        # The outputs import this module's enums.
        import interfaces

        outputs = {
            PipelineTask.TEXT_GENERATION: "TextGenerationOutput",
            PipelineTask.SPEECH_TOKEN_GENERATION: "TextGenerationOutput",
            PipelineTask.EMBEDDINGS_GENERATION: "EmbeddingsOutput",
            PipelineTask.AUDIO_GENERATION: "AudioGeneratorOutput",
        }
        if self not in outputs:
            raise ValueError(f"the task {self.value!r} has no output type; those with one: {', '.join(outputs)}")
        result: Any = interfaces.SchedulerResult
        return GenericAlias(dict, (str, result[getattr(interfaces, outputs[self])]))


class InputModality(enum.StrEnum):
    """What a model accepts."""

    TEXT = "text"
    IMAGE = "image"
    VIDEO = "video"


class BatchType(enum.Enum):
    """What a batch mostly does: context encoding (prefill) or token generation (decode)."""

    CE = "CE"
    TG = "TG"
