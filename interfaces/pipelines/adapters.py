"""Pipelines under the older protocols, and generators of the older protocols as pipelines.

A name says what the class is, then what it wraps: a `TokenGeneratorPipeline` is a pipeline.
"""

from __future__ import annotations

from typing import Any

from interfaces.base.request_id import RequestID
from interfaces.pipelines.audio import AudioGenerationMetadata, AudioGenerationOutput, AudioGenerationResponse
from interfaces.pipelines.generators import AudioGenerator, EmbeddingsGenerator, TokenGenerator
from interfaces.pipelines.inputs import AudioGenerationInputs, EmbeddingsGenerationInputs, TextGenerationInputs
from interfaces.pipelines.pipeline import Pipeline, PipelineOutputsDict
from interfaces.result.outputs import EmbeddingsOutput, TextGenerationOutput


class PipelineTokenGenerator:
    """A text pipeline as a `TokenGenerator`."""

    def __init__(self, pipeline: Pipeline[TextGenerationInputs[Any], TextGenerationOutput]) -> None:
        self._pipeline = pipeline

    def next_token(self, inputs: TextGenerationInputs[Any]) -> dict[RequestID, TextGenerationOutput]:
        return self._pipeline.execute(inputs)

    def release(self, request_id: RequestID) -> None:
        self._pipeline.release(request_id)


class TokenGeneratorPipeline(Pipeline[TextGenerationInputs[Any], TextGenerationOutput]):
    """A `TokenGenerator` as a pipeline."""

    def __init__(self, generator: TokenGenerator[Any]) -> None:
        self._generator = generator

    def execute(self, inputs: TextGenerationInputs[Any]) -> PipelineOutputsDict[TextGenerationOutput]:
        return self._generator.next_token(inputs)

    def release(self, request_id: RequestID) -> None:
        self._generator.release(request_id)


class PipelineEmbeddingsGenerator:
    """An embeddings pipeline as an `EmbeddingsGenerator`, which has no `release`: each request is released at once."""

    def __init__(self, pipeline: Pipeline[EmbeddingsGenerationInputs, EmbeddingsOutput]) -> None:
        self._pipeline = pipeline

    def encode(self, batch: dict[RequestID, Any]) -> dict[RequestID, EmbeddingsOutput]:
        try:
            return self._pipeline.execute(EmbeddingsGenerationInputs([batch]))
        finally:
            for request_id in batch:
                self._pipeline.release(request_id)


class EmbeddingsGeneratorPipeline(Pipeline[EmbeddingsGenerationInputs, EmbeddingsOutput]):
    """An `EmbeddingsGenerator`, which keeps nothing, as a pipeline."""

    def __init__(self, generator: EmbeddingsGenerator[Any]) -> None:
        self._generator = generator

    def execute(self, inputs: EmbeddingsGenerationInputs) -> PipelineOutputsDict[EmbeddingsOutput]:
        return self._generator.encode(inputs.batch)

    def release(self, request_id: RequestID) -> None:
        """Release a request. Nothing is kept, so there is no effect."""


class PipelineAudioGenerator:
    """An audio pipeline as an `AudioGenerator`. `decoder_sample_rate` is a fact of the model."""

    def __init__(
        self, pipeline: Pipeline[AudioGenerationInputs[Any], AudioGenerationOutput], decoder_sample_rate: int
    ) -> None:
        self._pipeline = pipeline
        self._prev_num_steps = 0
        self.decoder_sample_rate = decoder_sample_rate

    @property
    def prev_num_steps(self) -> int:
        return self._prev_num_steps

    def next_chunk(self, batch: dict[RequestID, Any]) -> dict[RequestID, AudioGenerationResponse]:
        outputs = self._pipeline.execute(AudioGenerationInputs(batch))
        self._prev_num_steps = max((output.steps_executed for output in outputs.values()), default=0)
        return {request_id: _response(output) for request_id, output in outputs.items()}

    def release(self, context: Any) -> None:
        self._pipeline.release(context.request_id)


class AudioGeneratorPipeline(Pipeline[AudioGenerationInputs[Any], AudioGenerationOutput]):
    """An `AudioGenerator` as a pipeline. It keeps the contexts, because the generator wants them for `release`."""

    def __init__(self, generator: AudioGenerator[Any]) -> None:
        self._generator = generator
        self._contexts: dict[RequestID, Any] = {}

    def execute(self, inputs: AudioGenerationInputs[Any]) -> PipelineOutputsDict[AudioGenerationOutput]:
        self._contexts |= inputs.batch
        responses = self._generator.next_chunk(inputs.batch)
        return {request_id: self._output(request_id, response) for request_id, response in responses.items()}

    def release(self, request_id: RequestID) -> None:
        context = self._contexts.pop(request_id, None)
        if context is not None:
            self._generator.release(context)

    def _output(self, request_id: RequestID, response: AudioGenerationResponse) -> AudioGenerationOutput:
        output = AudioGenerationOutput(
            final_status=response.final_status,
            steps_executed=self._generator.prev_num_steps,
            buffer_speech_tokens=response.buffer_speech_tokens,
            metadata=AudioGenerationMetadata(
                sample_rate=self._generator.decoder_sample_rate,
                request_id=str(request_id),
                final_chunk=response.is_done,
            ),
        )
        if response.has_audio_data:
            output.audio_data = response.audio_data
        return output


def _response(output: AudioGenerationOutput) -> AudioGenerationResponse:
    audio = output.audio_data if output.audio_data.size else None
    return AudioGenerationResponse(output.final_status, audio, output.buffer_speech_tokens)
