"""The tasks of pipelines, and the types of their outputs."""

from __future__ import annotations

import enum
from types import GenericAlias
from typing import Any

from interfaces.pipelines.audio import AudioGeneratorOutput
from interfaces.result.outputs import EmbeddingsOutput, TextGenerationOutput
from interfaces.result.results import SchedulerResult


class PipelineTask(enum.StrEnum):
    """The task of a pipeline."""

    TEXT_GENERATION = "text_generation"
    EMBEDDINGS_GENERATION = "embeddings_generation"
    AUDIO_GENERATION = "audio_generation"
    SPEECH_TOKEN_GENERATION = "speech_token_generation"
    PIXEL_GENERATION = "pixel_generation"
    UNDEFINED = "undefined"

    @property
    def output_type(self) -> Any:
        """Return the type to decode a scheduler's answers with: results by request id. ValueError for a task without
        one."""
        if self not in _OUTPUTS:
            raise ValueError(f"the task {self.value!r} has no output type; those with one: {', '.join(_OUTPUTS)}")
        result: Any = SchedulerResult
        return GenericAlias(dict, (str, result[_OUTPUTS[self]]))


_OUTPUTS: dict[PipelineTask, type] = {
    PipelineTask.TEXT_GENERATION: TextGenerationOutput,
    PipelineTask.SPEECH_TOKEN_GENERATION: TextGenerationOutput,
    PipelineTask.EMBEDDINGS_GENERATION: EmbeddingsOutput,
    PipelineTask.AUDIO_GENERATION: AudioGeneratorOutput,
}
