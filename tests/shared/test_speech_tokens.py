"""speech.json of a model that generates speech tokens: what it says, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.codec_files import CodecFiles
from shared.speech_tokens import SpeechTokenFiles, Voice

GIVEN: dict[str, Any] = {
    "codec": "codec",
    "prompt": ["<|say|>", "{text}"],
    "slots": [[1, "<|a|>"], [0, 70]],
    "stop": ["<|end|>"],
}


def write(folder: Path, **fields: Any) -> Path:
    """A checkpoint with a codec of two codebooks. A field that is None is left out."""
    (folder / "codec").mkdir()
    codec = {"model_type": "dac", "n_codebooks": 2, "codebook_size": 64, "sampling_rate": 16_000}
    (folder / "codec" / "config.json").write_text(json.dumps(codec))
    given = {name: value for name, value in (GIVEN | fields).items() if value is not None}
    (folder / "speech.json").write_text(json.dumps(given))
    return folder


def test_the_file_says_what_the_tokens_are(tmp_path: Path) -> None:
    voices = {"Ada": {}, "Bob": {"tokens": [7, 8, 9, 10], "transcript": "Hello."}}
    sampling = {"temperature": 0.6, "top_k": 20}
    files = SpeechTokenFiles.read(write(tmp_path, voices=voices, sampling=sampling, characters=100))
    assert files is not None
    assert files.codec == CodecFiles.read(tmp_path / "codec")
    assert (files.sample_rate, files.width, files.codebooks) == (16_000, 2, (1, 0))
    assert files.voices == {"Ada": Voice("Ada"), "Bob": Voice("Bob", (7, 8, 9, 10), "Hello.")}
    assert files.sampling == sampling
    assert files.characters == 100
    assert not files.takes_instructions
    assert files.ids_of(files.zeros, {"<|a|>": 6}.get) == (6, 70)
    with pytest.raises(ValueError, match=r"the vocabulary has no token '<\|end\|>': name one that it has"):
        files.ids_of(files.stop, lambda _: None)


def test_a_model_without_a_codec_generates_text(tmp_path: Path) -> None:
    assert SpeechTokenFiles.read(tmp_path) is None
    assert SpeechTokenFiles.read(write(tmp_path, codec=None)) is None


def test_one_voice_needs_no_name(tmp_path: Path) -> None:
    files = SpeechTokenFiles.read(write(tmp_path))
    assert files is not None
    assert list(files.voices) == ["default"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tempo": 1}, "tempo is unknown: the fields are codec, prompt,"),
        ({"codec": ""}, "codec must be a directory or hub name, got ''"),
        ({"prompt": []}, "prompt must be a list with at least one entry"),
        ({"prompt": ["<|say|>"]}, "prompt must have texts, and {text} in one of them"),
        ({"slots": [[0]]}, "slots must have pairs [codebook, token of its code 0], got [0]"),
        ({"slots": [[0, "a"], [0, "b"]]}, "slots must have the first codebooks, this many times: 1, 1; got [0, 0]"),
        (
            {"slots": [[0, 1], [1, 2], [2, 3]]},
            "slots must have the first codebooks, this many times: 1, 1; got [0, 1, 2]",
        ),
        ({"stop": [""]}, "stop must have tokens, as ids or as their texts"),
        ({"stop": None}, "stop must be a list with at least one entry, got None"),
        ({"voices": "Ada"}, "voices must be a list of names, or an object by name"),
        ({"voices": {"Ada": {"clip": 1}}}, "voices.Ada must be an object with tokens and transcript"),
        ({"voices": {"Ada": {"tokens": [1]}}}, "voices.Ada.tokens must be the ids of whole frames of 2 tokens"),
        ({"voices": {"Ada": {"tokens": [1, 2]}}}, "voices.Ada.transcript must be the text of the voice's tokens"),
        ({"sampling": {"beams": 2}}, "sampling.beams is unknown: the values are temperature,"),
        ({"sampling": {"top_k": 0.5}}, "sampling.top_k must be a number, got 0.5"),
        ({"characters": 0}, "characters must be a whole number of at least 1, got 0"),
    ],
)
def test_a_file_that_cannot_be_used_says_what_is_wrong(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write(tmp_path, **fields)
    with pytest.raises(ValueError) as caught:
        SpeechTokenFiles.read(tmp_path)
    assert f"speech.json of {tmp_path}: {message}" in str(caught.value)


def test_codecs_that_are_not_known_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "codec" / "config.json").write_text('{"model_type": "vinyl"}')
    with pytest.raises(ValueError, match=r"model_type 'vinyl'; those that can be used are: dac, mimi"):
        SpeechTokenFiles.read(tmp_path)
    (tmp_path / "codec" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json: name a codec's directory or hub name"):
        SpeechTokenFiles.read(tmp_path)
