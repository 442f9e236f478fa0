"""What a checkpoint's JSON files say about speech: its voices, its sample rate, and how a text becomes tokens.

Reads config.json, tokenizer_config.json, vocab.json and, where an operator has put one, speech.json with the names of
voices. Knows neither torch nor transformers' models, so that the API server reads the same facts as the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shared.json_files import read_json_file
from shared.pooling_files import SPEAKING, PoolingFiles
from shared.pooling_modules import file_of

# The name of the voice of a model that has one only.
ONLY_VOICE = "default"
# Token that is put between the characters of a text, and around it.
BLANK = 0
# Letters that a language's vocabulary has in another form.
_SAME_LETTERS = {"ron": {"ț": "ţ"}}


@dataclass(frozen=True)
class SpeechFiles:
    """The facts of one checkpoint of VITS or MMS."""

    source: str
    config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    vocabulary: Mapping[str, int]
    # Numbers of speakers, by the names that clients use.
    voices: Mapping[str, int]

    @classmethod
    def read(cls, source: str | Path) -> SpeechFiles:
        """Read a directory or hub name. ValueError names what is missing, broken, or not supported."""
        files = PoolingFiles.read(source)
        model_type = files.config.get("model_type")
        if model_type not in SPEAKING:
            known = ", ".join(SPEAKING)
            raise ValueError(
                f"task 'speak': {source} has model_type {model_type!r}; the types that speak are: {known}. "
                "A model that generates speech tokens speaks with a speech.json beside it, and task auto"
            )
        if files.tokenizer_config.get("phonemize", True):
            raise ValueError(
                f"tokenizer_config.json of {source} has phonemize true, and there is no phonemizer here: serve a "
                "checkpoint that reads letters, such as those of MMS, or set it to false and send phonemes"
            )
        vocabulary = _object(source, "vocab.json")
        if not vocabulary or not all(type(number) is int and number >= 0 for number in vocabulary.values()):
            raise ValueError(f"vocab.json of {source} must have an id for each character: copy the file again")
        return cls(str(source), files.config, files.tokenizer_config, vocabulary, _voices(source, files.config))

    @property
    def sample_rate(self) -> int:
        """Samples a second."""
        return int(self.config.get("sampling_rate", 16_000))

    @property
    def is_romanised(self) -> bool:
        """Whether the model was trained on texts that uroman has written in Latin letters."""
        return bool(self.tokenizer_config.get("is_uroman"))

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of a text, as transformers' VitsTokenizer does; empty when none of it can be spoken."""
        read = [self.vocabulary[letter] for letter in self.letters_of(text)]
        if not read or not self.tokenizer_config.get("add_blank", True):
            return read
        with_blanks = [BLANK] * (2 * len(read) + 1)
        with_blanks[1::2] = read
        return with_blanks

    def letters_of(self, text: str) -> str:
        """Return what the model reads of a text: characters that its vocabulary lacks are left out."""
        if self.tokenizer_config.get("normalize", True):
            text = "".join(letter if letter in self.vocabulary else letter.lower() for letter in text)
        for letter, same in self._same_letters.items():
            text = text.replace(letter, same)
        return "".join(letter for letter in text if letter in self.vocabulary).strip()

    def foreign_letter(self, text: str) -> str | None:
        """Return the first letter of another script than the Latin one, where the model reads romanised texts only."""
        if not self.is_romanised:
            return None
        unread = (letter for letter in text if not letter.isascii() and letter.isalpha())
        return next((letter for letter in unread if letter.lower() not in self.vocabulary), None)

    @cached_property
    def _same_letters(self) -> Mapping[str, str]:
        return _SAME_LETTERS.get(str(self.tokenizer_config.get("language")), {})


def _voices(source: str | Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the speakers by name: the numbers, or what speech.json calls them."""
    count = max(1, int(config.get("num_speakers", 1)))
    named = _object(source, "speech.json").get("voices", {})
    if not isinstance(named, dict):
        raise ValueError(f"speech.json of {source}: voices must be an object of speakers by name, got {named!r:.80}")
    for name, number in named.items():
        if type(number) is not int or not 0 <= number < count:
            raise ValueError(
                f"speech.json of {source}: voices.{name} must be a speaker's number from 0 to {count - 1}, "
                f"got {number!r:.80}"
            )
    return named or ({ONLY_VOICE: 0} if count == 1 else {str(number): number for number in range(count)})


def _object(source: str | Path, name: str) -> dict[str, Any]:
    path = file_of(source, name)
    if path is None:
        return {}
    try:
        found = read_json_file(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; copy the file again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} of {source} must be a JSON object, not {type(found).__name__}")
    return found
