"""`LLM.speak`: transformers' samples of each sentence, without a server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from api_server.speech.sentences import sentences
from deploy.offline import LLM
from shared.speech_files import SpeechFiles
from tests.model_worker.speech.tiny_speaker import SpeakerJudge, tiny_speaker
from tests.model_worker.speech.tiny_vits import Reference, tiny_vits

TEXT = "The first train leaves at nine. The second one is late again."


def test_a_text_is_spoken_sentence_by_sentence(tmp_path: Path) -> None:
    folder = tiny_vits(tmp_path)
    with LLM(folder) as llm:
        found = llm.speak(TEXT, voice="default", speed=0.7, seed=11)
        again = llm.speak(TEXT, speed=0.7, seed=11)
        with pytest.raises(ValueError, match="voice 'alloy' is unknown: this model has default"):
            llm.speak(TEXT, voice="alloy")
        with pytest.raises(ValueError, match="has nothing that this model can speak"):
            llm.speak("12")
        with pytest.raises(ValueError, match="seed must be from 0"):
            llm.speak(TEXT, seed=-1)
    ids = [SpeechFiles.read(folder).ids_of(sentence) for sentence in sentences(TEXT)]
    assert len(ids) == 2
    reference = Reference(folder)
    expected = [reference.samples(tokens, 11 + i, 0.7) for i, tokens in enumerate(ids)]
    np.testing.assert_allclose(found.samples, np.concatenate(expected), atol=1e-6)
    np.testing.assert_array_equal(again.samples, found.samples)
    assert found.sample_rate == 8000


@pytest.mark.slow
def test_speech_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tiny_speaker(tmp_path, "dac", length=160, characters=40)
    with LLM(folder, dtype="float32") as llm:
        found = llm.speak(TEXT, voice="Bob", seed=11)
        with pytest.raises(ValueError, match="voice 'alloy' is unknown: this model has Ada, Bob"):
            llm.speak(TEXT, voice="alloy")
        with pytest.raises(ValueError, match="speed must be 1"):
            llm.speak(TEXT, speed=2)
        with pytest.raises(ValueError, match="seed must be from 0"):
            llm.speak(TEXT, seed=-1)
    parts = sentences(TEXT, 40)
    assert len(parts) == 2
    expected = SpeakerJudge(folder).sound(*parts, voice="Bob")
    assert found.samples.shape == expected.shape
    assert np.abs(found.samples - expected).max() < 1e-5 * np.abs(expected).max()
    assert found.sample_rate == 8000
