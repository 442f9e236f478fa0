"""Features of the sounds of conversations, and the texts that stand for them, are those of transformers' processors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from api_server.media.processors import NoProcessor
from api_server.media.sound import SoundRefused
from api_server.media.sound_processors import SoundProcessor
from tests.api_server.media.test_sound import by_sndfile
from tests.model_worker.hearing.tiny_listeners import FAMILIES, RATE, SECONDS, made
from tests.model_worker.hearing.tiny_whisper import speech


@pytest.mark.parametrize("name", FAMILIES)
def test_arrays_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = made(name, tmp_path)
    processor = SoundProcessor(str(tmp_path), 60.0)
    assert (processor.facts.token, processor.facts.mark) == (tiny.family.token, tiny.family.mark)
    for seed, seconds in enumerate((0.4, 1.3317, float(SECONDS), tiny.family.seconds)):
        sound = speech(seed, seconds)
        found, length = processor.process(by_sndfile(sound, RATE, "WAV", "FLOAT"))
        arrays, count = tiny.heard(sound)
        assert found.run == tiny.family.token * count
        assert length == len(sound) / RATE
        wanted = {"pixel_values" if key == "input_features" else key: value.numpy() for key, value in arrays.items()}
        assert found.arrays.keys() == wanted.keys()
        for key, value in wanted.items():
            assert found.arrays[key].shape == value.shape
            np.testing.assert_allclose(found.arrays[key], value, atol=2e-4)
        assert sum(array.nbytes for array in found.arrays.values()) <= processor.facts.most_sound_bytes


def test_what_a_model_cannot_hear_is_refused(tmp_path: Path) -> None:
    made("qwen2_audio", tmp_path / "one")
    processor = SoundProcessor(str(tmp_path / "one"), 60.0)
    with pytest.raises(SoundRefused, match="longer than the 2 s"):
        processor.process(by_sndfile(speech(1, 2.2), RATE, "WAV"))
    with pytest.raises(SoundRefused, match="too short"):
        processor.process(by_sndfile(speech(1, 0.002), RATE, "WAV"))
    with pytest.raises(SoundRefused, match="is no sound file"):
        processor.process(b"<html>")
    made("voxtral", tmp_path / "many")
    with pytest.raises(SoundRefused, match="longer than the 3 s"):
        SoundProcessor(str(tmp_path / "many"), 3.0).process(by_sndfile(speech(1, 3.2), RATE, "WAV"))


def test_files_that_do_not_say_how_a_model_hears_are_named(tmp_path: Path) -> None:
    made("voxtral", tmp_path)
    config = (tmp_path / "config.json").read_text()
    token = config[config.index('"audio_token_id"') :].partition(",")[0]
    (tmp_path / "config.json").write_text(config.replace(token, '"audio_token_id": null'))
    with pytest.raises(NoProcessor, match="names no audio_token_id"):
        SoundProcessor(str(tmp_path), 60.0)
