"""Turns a text to speak into the prompts of a model that generates speech tokens, and their sampling.

Knows a checkpoint's speech.json and its tokenizer; knows neither requests nor the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from api_server.errors import ErrorKind, RequestFailed, invalid, shown
from api_server.text.tokenizer import Tokenizer
from interfaces import CodecFacts, SamplingParams, SamplingParamsInput, combine
from shared.pooling_modules import object_of
from shared.speech_tokens import FILE, ORDER, SpeechTokenFiles, Voice, codes_of

# Longest sound of one part of a text. A model that makes more of it does not know what it reads.
MOST_SECONDS = 120.0
# More tokens than generation_config.json may want at least.
_MANY_TOKENS = 1 << 20
# Voices that an error names.
_VOICES_SHOWN = 20
_PLACES = re.compile(r"\{(text|voice|instructions)\}")


@dataclass(frozen=True)
class SpeakingModel:
    """A model that generates speech tokens. `zeros` are the ids of code 0 for each place of a frame, `ends` those that
    end the speech."""

    files: SpeechTokenFiles
    tokenizer: Tokenizer
    zeros: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, source: str, tokenizer: Tokenizer) -> Self | None:
        """The facts of a checkpoint; None for one without speech tokens. Raises ValueError for broken files."""
        files = SpeechTokenFiles.read(source)
        if files is None:
            return None
        ends = files.ids_of(files.stop, tokenizer.token_of)
        model = cls(files, tokenizer, files.ids_of(files.zeros, tokenizer.token_of), ends)
        if problem := model._sampling_problem() or model._token_problem():
            raise ValueError(f"{FILE} of {files.source}: {problem}")
        return model

    @property
    def sample_rate(self) -> int:
        """Samples a second."""
        return self.files.sample_rate

    @property
    def voices(self) -> list[str]:
        return list(self.files.voices)

    def voice(self, name: str | None) -> Voice:
        """A voice; without a name the first one. Raises RequestFailed."""
        voices = self.files.voices
        if name is None:
            return next(iter(voices.values()))
        if name not in voices:
            known = ", ".join(list(voices)[:_VOICES_SHOWN]) + (", ..." if len(voices) > _VOICES_SHOWN else "")
            raise invalid(f"voice {shown(name)} is unknown: this model has {known}", "voice")
        return voices[name]

    def prompts(self, parts: Sequence[str], voice: Voice, instructions: str) -> list[list[int]]:
        """The prompt of each part of a text. Raises RequestFailed."""
        if not parts:
            raise invalid("input has nothing to speak: send a text with letters", "input")
        if instructions and not self.files.takes_instructions:
            raise RequestFailed(
                ErrorKind.UNSUPPORTED,
                "instructions: this model takes none, so leave the field out",
                field="instructions",
            )
        for text in parts:
            self.refuse_control(text, "input")
        self.refuse_control(instructions, "instructions")
        return [self._prompt(text, voice, instructions) for text in parts]

    def codes_of(self, tokens: list[int], before: int) -> list[int]:
        """The codes of speech tokens, of which so many codes came before. Tokens that stand for no code are no part."""
        return codes_of(tokens, self.zeros, self.files.codec.codebook_size, before)

    def sampling(self, seed: int, prompt: int, codec: CodecFacts, limit: int | None) -> SamplingParams:
        """The sampling of a part whose prompt has so many tokens. Raises RequestFailed where no sound
        fits behind it."""
        width = self.files.width
        most = width * int(MOST_SECONDS * codec.sample_rate / codec.frame_samples)
        room = most if limit is None else min(most, limit - prompt)
        if room < width:
            raise RequestFailed(
                ErrorKind.TOO_LONG,
                f"a part of input takes {prompt} tokens, and {limit} are possible with its speech: send shorter "
                "sentences",
                field="input",
            )
        order = {"zeros": list(self.zeros), "codes": self.files.codec.codebook_size, "ends": list(self.ends)}
        given = SamplingParamsInput(
            **self.files.sampling,  # type: ignore[arg-type]
            seed=seed,
            max_new_tokens=room,
            stop_token_ids=list(self.ends),
            named_processors={ORDER: json.dumps(order)},
        )
        return combine(given, self.tokenizer.defaults)

    def _sampling_problem(self) -> str:
        """Why no request can have the sampling of the file; empty if one can."""
        given = SamplingParamsInput(**self.files.sampling, max_new_tokens=_MANY_TOKENS)  # type: ignore[arg-type]
        try:
            combine(given, self.tokenizer.defaults)
        except ValueError as error:
            return f"sampling: {error}"
        return ""

    def _token_problem(self) -> str:
        """Which tokens of the file the model lacks, or which of a voice are no codes; empty if all are right."""
        size = self.files.codec.codebook_size
        known = object_of(self.files.source, "config.json").get("vocab_size")
        if isinstance(known, int):
            last = [("slots", zero + size - 1) for zero in self.zeros] + [("stop", end) for end in self.ends]
            for name, token in last:
                if token >= known:
                    return f"{name} has tokens up to {token}, and the model has 0 to {known - 1}: name others"
        for voice in self.files.voices.values():
            if len(self.codes_of(list(voice.tokens), 0)) != len(voice.tokens):
                return f"voices.{voice.name}.tokens must be codes in the order of slots: encode the voice again"
        return ""

    def _prompt(self, text: str, voice: Voice, instructions: str) -> list[int]:
        spoken = f"{voice.transcript} {text}" if voice.tokens else text
        values = {"text": spoken, "voice": voice.name, "instructions": instructions}
        ids: list[int] = []
        for part in self.files.prompt:
            ids += self.tokenizer.exact(_PLACES.sub(lambda place: values[place[1]], part))
        return [*ids, *voice.tokens]

    def refuse_control(self, text: str, field: str) -> None:
        """Raises RequestFailed for a text that names the model's own tokens."""
        control = next((token for token in self.tokenizer.exact(text) if token in self.tokenizer.added), None)
        if control is not None:
            name = self.tokenizer.token_text(control)
            raise invalid(f"{field} must be plain text, and it has the model's token {name!r:.60}: leave it out", field)
