"""Turns a text to speak into sentences of token ids, each with its seed, and a voice's name into its number.

Knows the facts of a checkpoint's files; knows neither requests nor the engine.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from api_server.errors import invalid, shown
from api_server.speech.sentences import MOST_CHARACTERS, sentences
from shared.speech_files import SpeechFiles

# The largest seed. Each sentence has the next one.
MOST_SEED = (1 << 63) - 1
# Voices that an error names.
_VOICES_SHOWN = 20


def voice_of(files: SpeechFiles, name: str | None) -> int:
    """The number of a voice; without a name that of the first one. Raises RequestFailed."""
    if name is None:
        return next(iter(files.voices.values()))
    if name not in files.voices:
        known = ", ".join(list(files.voices)[:_VOICES_SHOWN]) + (", ..." if len(files.voices) > _VOICES_SHOWN else "")
        raise invalid(f"voice {shown(name)} is unknown: this model has {known}", "voice")
    return files.voices[name]


def sentences_of(files: SpeechFiles, text: str, longest: int | None) -> list[list[int]]:
    """The token ids of each sentence, at most `longest`. Raises RequestFailed when nothing can be spoken."""
    if (letter := files.foreign_letter(text)) is not None:
        raise invalid(
            f"input has {letter!r}, and this model reads texts in Latin letters, as uroman writes them: romanise the "
            "text before you send it",
            "input",
        )
    # Blanks double the characters of a sentence.
    most = MOST_CHARACTERS if longest is None else max(1, min(MOST_CHARACTERS, (longest - 1) // 2))
    read = [ids for sentence in sentences(text, most) if (ids := files.ids_of(sentence))]
    if not read:
        letters = "".join(letter for letter in files.vocabulary if len(letter) == 1)
        raise invalid(
            f"input {shown(text)} has nothing that this model can speak: it reads {shown(letters)}; write numbers and "
            "signs as words",
            "input",
        )
    return read


def random_seed() -> int:
    """A seed that no client has to know."""
    return secrets.randbits(62)


def seeds_of(first: int, count: int) -> NDArray[np.int64]:
    """The seeds of so many sentences, from `first` on. The one behind the largest is 0."""
    return np.array([(first + i) % (MOST_SEED + 1) for i in range(count)], np.int64)
