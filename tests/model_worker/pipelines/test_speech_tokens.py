"""A pipeline of speech tokens: window by window, as the older protocol, and one request that continues another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from interfaces import AudioGenerationInputs, AudioGenerator, RequestID, SamplingParams, SpeechContext
from model_worker.pipelines.speech_tokens import SpeechTokenPipeline
from shared.speech_tokens import ORDER
from tests.model_worker.speech.tiny_speaker import CODES, SpeakerJudge, tiny_speaker, whole_sound


class Speaker:
    """A tiny model with its pipeline."""

    def __init__(self, folder: Path) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        given = json.loads((folder / "speech.json").read_text())
        self.folder = folder
        self.judge = SpeakerJudge(folder)
        self.zeros = [tokenizer.convert_tokens_to_ids(slot[1]) for slot in given["slots"]]
        self.codebooks = tuple(slot[0] for slot in given["slots"])
        self._ends = [tokenizer.convert_tokens_to_ids(token) for token in given["stop"]]
        self.pipeline = SpeechTokenPipeline.load(folder, self.zeros, dtype="float32")

    def context(self, text: str, most: int = 10_000, **fields: Any) -> SpeechContext:
        prompt = self.judge.prompt(text)
        order = {"zeros": self.zeros, "codes": CODES, "ends": self._ends}
        sampling = SamplingParams(
            temperature=0.0,
            max_new_tokens=min(most, self.pipeline.max_length - len(prompt)),
            stop_token_ids=self._ends,
            named_processors={ORDER: json.dumps(order)},
        )
        return SpeechContext.from_prompt(np.array(prompt, np.int32), sampling, **fields)

    def spoken(self, context: SpeechContext) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """All samples of a context, and the tokens that go before the sound of the next one."""
        sounds = []
        try:
            while True:
                output = self.pipeline.execute(AudioGenerationInputs({context.request_id: context}))[context.request_id]
                sounds.append(output.audio_data)
                if output.is_done:
                    assert output.buffer_speech_tokens is not None
                    return np.concatenate(sounds), output.buffer_speech_tokens
        finally:
            self.pipeline.release(context.request_id)


@pytest.fixture(scope="module", params=["mimi", "snac", "xcodec2"])
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    made = Speaker(tiny_speaker(tmp_path_factory.mktemp("speaker") / "model", request.param, length=192))
    yield made
    made.pipeline.close()


def assert_same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_the_sound_is_that_of_transformers(speaker: Speaker) -> None:
    text = "good morning to all."
    sound, _ = speaker.spoken(speaker.context(text))
    assert_same(sound, speaker.judge.sound(text))


def test_the_older_protocol(speaker: Speaker) -> None:
    generator = speaker.pipeline.generator
    assert isinstance(generator, AudioGenerator)
    texts = ["one two three.", "and so on."]
    contexts = {text: speaker.context(text) for text in texts}
    batch: dict[RequestID, Any] = {context.request_id: context for context in contexts.values()}
    sounds: dict[RequestID, list[NDArray[np.float32]]] = {name: [] for name in batch}
    steps = 0
    while batch:
        for name, chunk in generator.next_chunk(batch).items():
            sounds[name] += [chunk.audio_data] if chunk.has_audio_data else []
            if chunk.is_done:
                generator.release(batch.pop(name))
        steps += generator.prev_num_steps
    assert steps >= max(len(context.tokens.generated) for context in contexts.values())
    for text, context in contexts.items():
        assert_same(np.concatenate(sounds[context.request_id]), speaker.judge.sound(text))
        assert context.decoded_length == len(speaker.judge.frames(text)) * len(speaker.zeros)


def test_without_streaming_there_is_one_chunk(speaker: Speaker) -> None:
    context = speaker.context("good morning to all.", streaming=False)
    output = speaker.pipeline.execute(AudioGenerationInputs({context.request_id: context}))[context.request_id]
    speaker.pipeline.release(context.request_id)
    assert (output.is_done, output.metadata.chunk_id, output.metadata.final_chunk) == (True, 0, True)
    assert_same(output.audio_data, speaker.judge.sound("good morning to all."))


def test_a_request_that_continues_another_has_no_seam(speaker: Speaker) -> None:
    if speaker.codebooks == (0,):
        pytest.skip("a codec that attends to all codes decodes each request by itself")
    width = len(speaker.zeros)
    first, buffer = speaker.spoken(speaker.context("one two three.", 30 * width))
    second, _ = speaker.spoken(speaker.context("and so on.", 30 * width, buffer_speech_tokens=buffer))
    frames = np.concatenate([speaker.judge.frames(text)[:30] for text in ("one two three.", "and so on.")])
    joined = whole_sound(speaker.folder / "codec", frames, speaker.codebooks)
    # The end of the first one was decoded without what follows; behind it the sound is that of both.
    assert len(first) + len(second) == len(joined)
    if width == 3:  # Mimi's frames do not depend on later ones
        assert_same(np.concatenate([first, second]), joined)


def test_tokens_for_each_code_are_needed(speaker: Speaker) -> None:
    with pytest.raises(ValueError, match=f"zeros must have {len(speaker.zeros)} tokens, one for each code, got 9"):
        SpeechTokenPipeline.load(speaker.folder, [1] * 9)
