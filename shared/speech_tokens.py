"""What speech.json beside a checkpoint says of a model that generates speech tokens: its codec, the form of its prompt,
which tokens are codes, its voices and its sampling.

An operator writes the file, because such checkpoints do not say it themselves. Knows neither torch nor transformers'
models, so that the API server reads the same facts as the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.codec_files import CodecFiles
from shared.gguf.format import is_gguf
from shared.pooling_modules import object_of
from shared.speech_files import ONLY_VOICE

FILE = "speech.json"
# Name of the logits processor that keeps speech tokens in their order (model_worker/speech/token_order.py).
ORDER = "speech_tokens"
# Most characters of a text that is spoken at a time, where speech.json does not say it.
USUAL_CHARACTERS = 400
_FIELDS = ("codec", "prompt", "slots", "stop", "voices", "sampling", "characters")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# The id of a token by its text, or None.
TokenOf = Callable[[str], int | None]


@dataclass(frozen=True)
class Voice:
    """A voice: its name in prompts, and speech tokens with their text that the model goes on from, if there are any."""

    name: str
    tokens: tuple[int, ...] = ()
    transcript: str = ""


@dataclass(frozen=True)
class SpeechTokenFiles:
    """The facts of one checkpoint. The parts of `prompt` that have {text} or {voice} are the client's."""

    source: str
    codec: CodecFiles
    prompt: tuple[str, ...]
    # The codebook of each code of a frame.
    codebooks: tuple[int, ...]
    # Ids or texts of the tokens that stand for code 0, for each code of a frame; and of those that end the speech.
    zeros: tuple[int | str, ...]
    stop: tuple[int | str, ...]
    voices: Mapping[str, Voice]
    sampling: Mapping[str, float] = field(default_factory=dict)
    characters: int = USUAL_CHARACTERS

    @classmethod
    def read(cls, source: str | Path) -> SpeechTokenFiles | None:
        """Read a checkpoint's speech.json; None without one that names a codec. ValueError names the field."""
        if not str(source) or is_gguf(source):
            return None
        given = object_of(source, FILE)
        if "codec" not in given:
            return None
        return _read(str(source), given)

    @property
    def sample_rate(self) -> int:
        return self.codec.sample_rate

    @property
    def width(self) -> int:
        """The number of codes of a frame."""
        return len(self.codebooks)

    @property
    def takes_instructions(self) -> bool:
        return any("{instructions}" in part for part in self.prompt)

    def ids_of(self, tokens: tuple[int | str, ...], token_of: TokenOf) -> tuple[int, ...]:
        """Return the ids of tokens that the file names. ValueError for one that the vocabulary lacks."""
        return tuple(token if isinstance(token, int) else self._id_of(token, token_of) for token in tokens)

    def _id_of(self, token: str, token_of: TokenOf) -> int:
        found = token_of(token)
        if found is None:
            raise ValueError(f"{FILE} of {self.source}: the vocabulary has no token {token!r}: name one that it has")
        return found


def codes_of(tokens: Sequence[int], zeros: Sequence[int], size: int, before: int) -> list[int]:
    """Return the codes, from 0 to below `size`, of speech tokens, of which so many codes came before.

    `zeros` are the ids of code 0 for each place of a frame. Tokens that stand for no code are left out.
    """
    codes: list[int] = []
    for token in tokens:
        code = token - zeros[(before + len(codes)) % len(zeros)]
        if 0 <= code < size:
            codes.append(code)
    return codes


def _read(source: str, given: Mapping[str, Any]) -> SpeechTokenFiles:
    for name in given:
        if name not in _FIELDS:
            raise _error(source, name, f"is unknown: the fields are {', '.join(_FIELDS)}")
    codec = CodecFiles.read(_codec_source(source, given["codec"]))
    slots = _list(source, given, "slots")
    for slot in slots:
        if not (isinstance(slot, list) and len(slot) == 2 and type(slot[0]) is int and _is_token(slot[1])):
            raise _error(source, "slots", f"must have pairs [codebook, token of its code 0], got {slot!r:.80}")
    codebooks = tuple(slot[0] for slot in slots)
    counts = tuple(codebooks.count(book) for book in range(max(codebooks) + 1))
    if counts != codec.codes_of_frame[: len(counts)]:
        wanted = ", ".join(map(str, codec.codes_of_frame))
        raise _error(
            source, "slots", f"must have the first codebooks, this many times: {wanted}; got {list(codebooks)}"
        )
    stop = _list(source, given, "stop")
    if not all(map(_is_token, stop)):
        raise _error(source, "stop", f"must have tokens, as ids or as their texts, got {stop!r:.80}")
    prompt = _list(source, given, "prompt")
    if not all(isinstance(part, str) for part in prompt) or not any("{text}" in part for part in prompt):
        raise _error(source, "prompt", f"must have texts, and {{text}} in one of them, got {prompt!r:.80}")
    characters = given.get("characters", USUAL_CHARACTERS)
    if type(characters) is not int or characters < 1:
        raise _error(source, "characters", f"must be a whole number of at least 1, got {characters!r:.80}")
    return SpeechTokenFiles(
        source=source,
        codec=codec,
        prompt=tuple(prompt),
        codebooks=codebooks,
        zeros=tuple(slot[1] for slot in slots),
        stop=tuple(stop),
        voices=_voices(source, given, len(codebooks)),
        sampling=_sampling(source, given),
        characters=characters,
    )


def _codec_source(source: str, codec: object) -> str:
    """A folder within the checkpoint, another directory, or a hub name."""
    if not isinstance(codec, str) or not codec:
        raise _error(source, "codec", f"must be a directory or hub name, got {codec!r:.80}")
    inside = Path(source).expanduser() / codec
    return str(inside) if inside.is_dir() else codec


def _voices(source: str, given: Mapping[str, Any], width: int) -> dict[str, Voice]:
    named = given.get("voices") or [ONLY_VOICE]
    if isinstance(named, list):
        named = {name: {} for name in named}
    if not isinstance(named, dict):
        raise _error(source, "voices", f"must be a list of names, or an object by name, got {named!r:.80}")
    found = {}
    for name, facts in named.items():
        if not isinstance(name, str) or not isinstance(facts, dict) or not facts.keys() <= {"tokens", "transcript"}:
            raise _error(source, f"voices.{name}", f"must be an object with tokens and transcript, got {facts!r:.80}")
        tokens = facts.get("tokens", [])
        transcript = facts.get("transcript", "")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens) or len(tokens) % width:
            raise _error(source, f"voices.{name}.tokens", f"must be the ids of whole frames of {width} tokens")
        if not isinstance(transcript, str) or bool(tokens) != bool(transcript):
            raise _error(source, f"voices.{name}.transcript", "must be the text of the voice's tokens, if it has any")
        found[name] = Voice(name, tuple(tokens), transcript)
    return found


def _sampling(source: str, given: Mapping[str, Any]) -> dict[str, float]:
    sampling = given.get("sampling", {})
    if not isinstance(sampling, dict):
        raise _error(source, "sampling", f"must be an object, got {sampling!r:.80}")
    for name, value in sampling.items():
        if name not in _SAMPLING:
            raise _error(source, f"sampling.{name}", f"is unknown: the values are {', '.join(_SAMPLING)}")
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise _error(source, f"sampling.{name}", f"must be a number, got {value!r:.80}")
    return dict(sampling)


def _list(source: str, given: Mapping[str, Any], name: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise _error(source, name, f"must be a list with at least one entry, got {value!r:.80}")
    return value


def _is_token(value: object) -> bool:
    return (type(value) is int and value >= 0) or (isinstance(value, str) and value != "")


def _error(source: str, name: str, problem: str) -> ValueError:
    return ValueError(f"{FILE} of {source}: {name} {problem}")
