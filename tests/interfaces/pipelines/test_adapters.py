"""Each face of a pipeline, made of the other, says and frees the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from interfaces import (
    AudioGenerationInputs,
    AudioGenerationMetadata,
    AudioGenerationOutput,
    AudioGenerationResponse,
    AudioGenerator,
    AudioGeneratorPipeline,
    EmbeddingsGenerationInputs,
    EmbeddingsGenerator,
    EmbeddingsGeneratorPipeline,
    EmbeddingsOutput,
    GenerationStatus,
    Pipeline,
    PipelineAudioGenerator,
    PipelineEmbeddingsGenerator,
    PipelineTokenGenerator,
    RequestID,
    SpeechContext,
    TextContext,
    TextGenerationInputs,
    TextGenerationOutput,
    TokenBuffer,
    TokenGenerator,
    TokenGeneratorPipeline,
)

A, B = RequestID("a"), RequestID("b")


class Counting(Pipeline[TextGenerationInputs[TextContext], TextGenerationOutput]):
    """Its tokens count upwards from the last one."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def execute(self, inputs: TextGenerationInputs[TextContext]) -> dict[RequestID, TextGenerationOutput]:
        for _ in range(inputs.num_steps):
            for context in inputs.flat_batch:
                context.update(int(context.tokens[-1]) + 1)
        return {context.request_id: context.to_generation_output() for context in inputs.flat_batch}

    def release(self, request_id: RequestID) -> None:
        self.released.append(str(request_id))


class Summing(Pipeline[EmbeddingsGenerationInputs, EmbeddingsOutput]):
    """Embeds a text as the sum of its tokens."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def execute(self, inputs: EmbeddingsGenerationInputs) -> dict[RequestID, EmbeddingsOutput]:
        self.held |= set(inputs.batch)
        sums = {name: float(context.tokens.all.sum()) for name, context in inputs.batch.items()}
        return {name: EmbeddingsOutput(np.array([total])) for name, total in sums.items()}

    def release(self, request_id: RequestID) -> None:
        self.held.discard(request_id)


class Humming(Pipeline[AudioGenerationInputs[SpeechContext], AudioGenerationOutput]):
    """Silence first, then a chunk as long as the prompt, which is the last."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.released: list[str] = []

    def execute(self, inputs: AudioGenerationInputs[SpeechContext]) -> dict[RequestID, AudioGenerationOutput]:
        return {name: self._chunk(name, context) for name, context in inputs.batch.items()}

    def _chunk(self, name: RequestID, context: SpeechContext) -> AudioGenerationOutput:
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.calls[name] == 1:
            return AudioGenerationOutput(GenerationStatus.ACTIVE, 1)
        samples = np.ones(len(context.tokens), np.float32)
        tokens = np.arange(3)
        return AudioGenerationOutput(GenerationStatus.END_OF_SEQUENCE, 5 + len(context.tokens), samples, tokens)

    def release(self, request_id: RequestID) -> None:
        self.released.append(str(request_id))


def text(name: RequestID, *tokens: int) -> TextContext:
    return TextContext(tokens=TokenBuffer(np.array(tokens)), max_length=99, request_id=name)


def speech(name: RequestID, *tokens: int) -> SpeechContext:
    return SpeechContext(tokens=TokenBuffer(np.array(tokens)), max_length=99, request_id=name)


def test_text_both_ways() -> None:
    pipeline = Counting()
    generator = PipelineTokenGenerator(pipeline)
    assert isinstance(generator, TokenGenerator)
    back = TokenGeneratorPipeline(generator)
    assert isinstance(back, Pipeline)
    first = generator.next_token(TextGenerationInputs({A: text(A, 4)}, 2))
    second = back.execute(TextGenerationInputs([[text(A, 4)], [text(B, 7, 8)]], 2))
    assert first[A].tokens == second[A].tokens == [5, 6]
    assert second[B].tokens == [9, 10]
    back.release(A)
    generator.release(B)
    assert pipeline.released == ["a", "b"]


def test_embeddings_both_ways_keep_nothing() -> None:
    pipeline = Summing()
    generator = PipelineEmbeddingsGenerator(pipeline)
    assert isinstance(generator, EmbeddingsGenerator)
    contexts: Any = {A: text(A, 1, 2), B: text(B, 5)}
    direct = generator.encode(contexts)
    assert pipeline.held == set()
    back = EmbeddingsGeneratorPipeline(generator)
    assert back.execute(EmbeddingsGenerationInputs([{A: contexts[A]}, {B: contexts[B]}])) == direct
    back.release(A)
    assert [direct[name].embeddings.tolist() for name in (A, B)] == [[3.0], [5.0]]


def test_audio_both_ways() -> None:
    pipeline = Humming()
    generator = PipelineAudioGenerator(pipeline, decoder_sample_rate=24_000)
    assert isinstance(generator, AudioGenerator)
    assert generator.prev_num_steps == 0
    batch = {A: speech(A, 1, 2), B: speech(B, 3, 4, 5)}
    assert generator.next_chunk(batch)[A] == AudioGenerationResponse(GenerationStatus.ACTIVE)
    last = generator.next_chunk(batch)
    assert (last[B].audio_data.tolist(), last[B].is_done, generator.prev_num_steps) == ([1, 1, 1], True, 8)
    assert last[B].buffer_speech_tokens is not None
    generator.release(batch[A])
    assert pipeline.released == ["a"]


def test_an_audio_generator_as_a_pipeline_releases_by_context() -> None:
    pipeline = Humming()
    back = AudioGeneratorPipeline(PipelineAudioGenerator(pipeline, decoder_sample_rate=24_000))
    inputs = AudioGenerationInputs({A: speech(A, 1, 2)})
    quiet = back.execute(inputs)[A]
    assert (quiet.audio_data.size, quiet.is_done, quiet.steps_executed) == (0, False, 1)
    loud = back.execute(inputs)[A]
    assert (loud.audio_data.tolist(), loud.is_done, loud.steps_executed) == ([1, 1], True, 7)
    assert loud.metadata == AudioGenerationMetadata(sample_rate=24_000, request_id="a", final_chunk=True)
    back.release(A)
    back.release(A)
    assert pipeline.released == ["a"]
