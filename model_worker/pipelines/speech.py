"""Speech within one process: the server's speaker as a pipeline, whose next chunk is the next sentence.

Knows contexts of sentences. Does not know how samples are computed (model_worker/speech/ does).
"""

from __future__ import annotations

import time
from pathlib import Path

from interfaces import (
    AudioGenerationInputs,
    AudioGenerationMetadata,
    AudioGenerationOutput,
    GenerationStatus,
    Pipeline,
    PipelineAudioGenerator,
    RequestID,
    SynthesisContext,
)
from model_worker.speech.load import load_speech
from model_worker.speech.vits import VitsSpeaker


class SpeechPipeline(Pipeline[AudioGenerationInputs[SynthesisContext], AudioGenerationOutput]):
    """Do not use it from two threads at once. `generator` is the same as an `AudioGenerator`."""

    def __init__(self, speaker: VitsSpeaker) -> None:
        self._speaker = speaker
        # Sentences that each request has heard.
        self._spoken: dict[RequestID, int] = {}

    @classmethod
    def load(cls, model: str | Path, *, device: str = "cpu", dtype: str = "auto") -> SpeechPipeline:
        """Load a Hugging Face directory or hub name. ValueError says why a model cannot be used."""
        return cls(load_speech(model, dtype, device))

    @property
    def max_length(self) -> int:
        """The most tokens that a sentence can have."""
        return self._speaker.max_model_len

    @property
    def sample_rate(self) -> int:
        return self._speaker.sample_rate

    @property
    def generator(self) -> PipelineAudioGenerator:
        """The pipeline as an `AudioGenerator`. No speech tokens are generated, so its `prev_num_steps` stays 0."""
        return PipelineAudioGenerator(self, self.sample_rate)

    def execute(self, inputs: AudioGenerationInputs[SynthesisContext]) -> dict[RequestID, AudioGenerationOutput]:
        """Return the next sentence of each context, or nothing where all have been heard.

        ValueError for a sentence that the model cannot speak; the others of the call are spoken again then.
        """
        places = {name: self._spoken.get(name, 0) for name in inputs.batch}
        outputs = {name: self._next(context, places[name]) for name, context in inputs.batch.items()}
        self._spoken.update({name: min(places[name] + 1, len(context)) for name, context in inputs.batch.items()})
        return outputs

    def release(self, request_id: RequestID) -> None:
        """Forget a request: it begins anew when it comes again."""
        self._spoken.pop(request_id, None)

    def _next(self, context: SynthesisContext, place: int) -> AudioGenerationOutput:
        if place >= len(context):
            return AudioGenerationOutput(GenerationStatus.END_OF_SEQUENCE, 0)
        begun = time.monotonic()
        values, _ = self._speaker.run(context.part(place, place + 1))
        is_last = place + 1 == len(context)
        status = GenerationStatus.END_OF_SEQUENCE if is_last else GenerationStatus.ACTIVE
        metadata = AudioGenerationMetadata(
            sample_rate=self.sample_rate,
            duration=len(values) / self.sample_rate,
            chunk_id=place,
            final_chunk=is_last,
            model_name=context.model_name or None,
            request_id=str(context.request_id),
            processing_time=time.monotonic() - begun,
        )
        return AudioGenerationOutput(status, 0, values[:, 0], metadata=metadata)
