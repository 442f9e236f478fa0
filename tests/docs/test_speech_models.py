"""The public models that docs/speech_models.md names are of kinds that are served here, and that tests compare."""

from __future__ import annotations

import re
from pathlib import Path

from api_server.media.sound_processors import _RULES
from shared.codec_files import KINDS
from shared.listening import LISTENING_TYPES
from shared.pooling_files import SPEAKING
from shared.recogniser_files import SPEECH_TYPES
from tests.model_worker.hearing.tiny_listeners import FAMILIES
from tests.model_worker.speech.tiny_speaker import KINDS as TINY_CODECS

PAGE = Path(__file__).parents[2] / "docs" / "speech_models.md"


def rows(heading: str) -> list[list[str]]:
    """The rows of the table below a heading, cell by cell."""
    part = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_models_that_speak_are_of_kinds_that_are_compared_with_transformers() -> None:
    found = rows("Speech out")
    assert len(found) > 2
    for name, kind, *_ in found:
        decoder, *codec = re.findall("`([a-z0-9]+)`", kind)
        if codec:
            assert decoder == "llama", name
            assert codec[0] in KINDS, name
            assert codec[0] in TINY_CODECS, name
        else:
            assert decoder in SPEAKING, name


def test_models_that_hear_are_of_kinds_that_are_compared_with_transformers() -> None:
    found = rows("Speech in")
    assert len(found) > 9
    kinds = {kind.strip("`") for _, kind, *_ in found}
    # Tiny models of Whisper's class have tests of their own.
    assert kinds == {*SPEECH_TYPES, *LISTENING_TYPES} == {"whisper", *FAMILIES}
    assert set(LISTENING_TYPES) == set(_RULES)
