"""What the files of a checkpoint say about speech, beside transformers' own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import VitsTokenizer

from shared.pooling_files import task_of
from shared.speech_files import SpeechFiles
from tests.model_worker.speech.tiny_vits import LETTERS, TOKENIZER, files_of
from tests.seeds import examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files_of(tmp_path_factory.mktemp("vits"))


def test_the_task_is_found(folder: Path) -> None:
    assert task_of(folder) == "speak"


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(st.sampled_from([*LETTERS, *"ABCÉßİțţ .,!7\n", "я"])), blank=st.booleans(), ron=st.booleans())
def test_ids_are_those_of_transformers(folder: Path, text: str, blank: bool, ron: bool) -> None:
    options = TOKENIZER | {"add_blank": blank, "language": "ron" if ron else "eng"}
    files = SpeechFiles("", {}, options, json.loads((folder / "vocab.json").read_text()), {})
    # transformers takes its padding token, which is a letter here, for a mark where a text has it.
    text = text.replace("_", "")
    make: Any = VitsTokenizer
    theirs = make(str(folder / "vocab.json"), **{k: v for k, v in options.items() if k != "tokenizer_class"})
    assert files.ids_of(text) == theirs(text)["input_ids"]


def test_voices_are_numbers_or_have_names(tmp_path: Path) -> None:
    assert SpeechFiles.read(files_of(tmp_path / "one")).voices == {"default": 0}
    several = files_of(tmp_path / "several", num_speakers=3, speaker_embedding_size=8)
    assert SpeechFiles.read(several).voices == {"0": 0, "1": 1, "2": 2}
    (several / "speech.json").write_text(json.dumps({"voices": {"Ada": 2, "Bob": 0}}))
    assert SpeechFiles.read(several).voices == {"Ada": 2, "Bob": 0}
    for wrong in ({"Ada": 3}, {"Ada": "x"}, {"Ada": True}):
        (several / "speech.json").write_text(json.dumps({"voices": wrong}))
        with pytest.raises(ValueError, match=r"voices\.Ada must be a speaker's number from 0 to 2"):
            SpeechFiles.read(several)
    (several / "speech.json").write_text(json.dumps({"voices": ["Ada"]}))
    with pytest.raises(ValueError, match="voices must be an object"):
        SpeechFiles.read(several)


def test_files_that_are_broken_or_missing_are_named(tmp_path: Path) -> None:
    broken = files_of(tmp_path / "broken")
    (broken / "vocab.json").write_text("{")
    with pytest.raises(ValueError, match=r"vocab\.json cannot be read"):
        SpeechFiles.read(broken)
    (broken / "vocab.json").write_text('{"a": "b"}')
    with pytest.raises(ValueError, match="must have an id for each character"):
        SpeechFiles.read(broken)
    (broken / "vocab.json").unlink()
    with pytest.raises(ValueError, match="must have an id for each character"):
        SpeechFiles.read(broken)


def test_letters_of_another_script_are_found_where_texts_are_romanised(tmp_path: Path) -> None:
    latin = SpeechFiles.read(files_of(tmp_path / "latin", {"is_uroman": True}))
    assert latin.foreign_letter("Hello, É! 7") is None
    assert latin.foreign_letter("Hello, привет") == "п"
    assert SpeechFiles.read(files_of(tmp_path / "other")).foreign_letter("привет") is None
