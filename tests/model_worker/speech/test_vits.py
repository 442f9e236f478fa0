"""Sentences that a VITS model speaks: transformers' samples, whatever is spoken beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interfaces import Batch, PooledValues, PoolingContext, PoolingTask, SynthesisContext, decode, encode
from model_worker.model import ModelRefused
from model_worker.one_shot import TextRunner
from model_worker.speech import vits
from model_worker.speech.load import load_speech
from tests.model_worker.speech.tiny_vits import LETTERS, Reference, files_of, tiny_vits

KINDS: dict[str, dict[str, Any]] = {
    "one voice": {},
    "voices": {"num_speakers": 3, "speaker_embedding_size": 8},
    "plain durations": {"use_stochastic_duration_prediction": False, "speaking_rate": 0.8},
}


def sentence(length: int) -> list[int]:
    ids: list[int] = np.random.default_rng().integers(0, len(LETTERS), length).tolist()
    return ids


def context(texts: list[list[int]], seeds: list[int], **options: Any) -> SynthesisContext:
    return SynthesisContext.of(texts, PoolingTask.SPEAK, seeds=np.array(seeds), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_transformers_alone_and_beside_others(kind: str, tmp_path: Path) -> None:
    config = KINDS[kind]
    folder = tiny_vits(tmp_path, **config)
    reference = Reference(folder)
    speaker = load_speech(folder)
    voices = [0, 2] if "num_speakers" in config else [0]
    for voice in voices:
        texts = [sentence(length) for length in (21, 1, 9, 40)]
        seeds = np.random.default_rng().integers(0, 2**62, 4).tolist()
        speed = float(np.random.default_rng().uniform(0.5, 2.0))
        values, lengths = speaker.run(context(texts, seeds, voice=voice, speed=speed))
        for text, seed, found in zip(texts, seeds, np.split(values[:, 0], np.cumsum(lengths)[:-1]), strict=True):
            expected = reference.samples(text, seed, speed, voice if len(voices) > 1 else None)
            # The same modules in the same order; only normalised weights are computed once.
            np.testing.assert_allclose(found, expected, atol=1e-6)
            assert expected.std() > 0.0
            alone, _ = speaker.run(context([text], [seed], voice=voice, speed=speed))
            np.testing.assert_array_equal(alone[:, 0], found)


def test_noise_takes_nothing_from_the_generator_of_the_process(tmp_path: Path) -> None:
    speaker = load_speech(tiny_vits(tmp_path))
    torch.manual_seed(1)
    first = torch.rand(3)
    torch.manual_seed(1)
    speaker.run(context([sentence(5)], [7]))
    assert torch.equal(torch.rand(3), first)


def test_a_batch_of_several_requests_comes_back_by_part(tmp_path: Path) -> None:
    speaker = load_speech(tiny_vits(tmp_path))
    parts: list[PoolingContext | SynthesisContext] = [
        context([sentence(9), sentence(5)], [1, 2]),
        context([sentence(7)], [3], speed=0.5),
        context([[999]], [4]),
        PoolingContext.of([[1]], PoolingTask.EMBED),
    ]
    result = TextRunner(speaker, 0, 1).run(decode(encode(Batch(1, 1, 1, parts))))
    for place in (0, 1):
        found = result.parts[place]
        part = parts[place]
        assert isinstance(found, PooledValues)
        assert isinstance(part, SynthesisContext)
        np.testing.assert_array_equal(found.array, speaker.run(part)[0])
    assert set(result.errors) == {2, 3}
    assert "token id 999 is outside of the vocabulary" in result.errors[2]
    assert "task 'embed' is not what VitsModel does" in result.errors[3]


def test_requests_with_equal_options_are_spoken_in_one_pass_over_all(tmp_path: Path) -> None:
    speaker = load_speech(tiny_vits(tmp_path))
    parts = [context([sentence(9), sentence(5)], [1, 2]), context([sentence(7)], [3])]
    seen: list[list[int]] = []

    class Watched:
        """A speaker that writes down the seeds of each call."""

        def run(self, texts: SynthesisContext) -> Any:
            seen.append(texts.seeds.tolist())
            return speaker.run(texts)

    watched: Any = Watched()
    result = TextRunner(watched, 0, 1).run(decode(encode(Batch(1, 1, 1, list(parts)))))
    assert seen == [[1, 2, 3]]
    assert not result.errors
    for part, found in zip(parts, result.parts, strict=True):
        assert isinstance(found, PooledValues)
        np.testing.assert_array_equal(found.array, speaker.run(part)[0])


def test_a_voice_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    speaker = load_speech(tiny_vits(tmp_path))
    with pytest.raises(ValueError, match="voice must be a speaker's number from 0 to 0, got 1"):
        speaker.run(context([[1]], [1], voice=1))


def test_a_sound_that_is_too_long_is_refused_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = load_speech(tiny_vits(tmp_path))
    monkeypatch.setattr(vits, "MOST_SECONDS", 0.01)
    with pytest.raises(ValueError, match="send shorter sentences"):
        speaker.run(context([sentence(300)], [1]))


@pytest.mark.parametrize("speed", [0.25, 4.0])
def test_the_longest_sound_is_that_of_the_wanted_speed(
    speed: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker = load_speech(tiny_vits(tmp_path))
    asked = context([[1] * 40], [1], speed=speed)
    seconds = len(speaker.run(asked)[0]) / speaker.sample_rate
    monkeypatch.setattr(vits, "MOST_SECONDS", seconds * 2)
    speaker.run(asked)
    monkeypatch.setattr(vits, "MOST_SECONDS", seconds / 2)
    with pytest.raises(ValueError, match="shorter sentences, or a higher speed"):
        speaker.run(asked)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16"}, "dtype must be auto or float32"),
        ({"quantization": "int8"}, "quantization must be none"),
        ({"max_model_len": 2000}, "max_model_len must be at most 1024"),
    ],
)
def test_settings_that_it_cannot_have_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load_speech(files_of(tmp_path), **options)


def test_checkpoints_that_cannot_speak_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"no weights|safetensors"):
        load_speech(files_of(tmp_path / "empty"))
    with pytest.raises(ValueError, match="phonemize true"):
        load_speech(files_of(tmp_path / "phonemes", {"phonemize": True}))
    other = files_of(tmp_path / "other")
    (other / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="model_type 'bert'; the types that speak are: vits"):
        load_speech(other)
