"""Makes features of the sounds of a conversation, and the text that stands for one, as transformers' processors do.

Those processors want torch, so the rule of each family is written here: how a sound is cut into windows, and how many
tokens stand for it. Knows models that hear; knows no file format.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.media.log_mel import log_mel
from api_server.media.processors import Arrays, NoProcessor, Vision
from api_server.media.sound import SoundRefused, decoded
from shared.recogniser_files import MelForm, mel_form
from shared.tokenizer_files import load_tokenizer, read_json

# Longer than any sound that a server takes.
_ANY_LENGTH = 1e6


@dataclass(frozen=True)
class _Rule:
    """How a family hears."""

    # The number of tokens for so many frames of sound, as the model's config has it.
    tokens_of: Callable[[int, Any], int]
    # The argument of the model that says which frames are sound; "": it has none, and hears the silence, too.
    mask: str = ""
    # The longest sound in seconds; 0: one window.
    longest: float = 0.0
    # Whether loudness is measured over the whole sound, and not window by window.
    is_whole: bool = False
    # Tokens that chat templates write before and behind a sound.
    around: tuple[str, str] = ("", "")


def _pooled(frames: int, _: Any) -> int:
    """The encoder halves the frames, and pools two of its positions."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _merged(frames: int, _: Any) -> int:
    """The encoder halves the frames, and four of its positions become one."""
    return ((frames - 1) // 2 + 1 - 4) // 4 + 1


def _folded(frames: int, config: Any) -> int:
    """The encoder halves the frames, and as many positions become one as fill the projector's input."""
    return frames // 2 * config.hidden_size // config.intermediate_size  # type: ignore[no-any-return]


_RULES = {
    "audioflamingo3": _Rule(_pooled, "input_features_mask", 600.0),
    "glmasr": _Rule(_merged, "input_features_mask", 655.0, around=("<|begin_of_audio|>", "<|end_of_audio|>")),
    "qwen2_audio": _Rule(_pooled, "feature_attention_mask", around=("<|audio_bos|>", "<|audio_eos|>")),
    "voxtral": _Rule(_folded, longest=_ANY_LENGTH, is_whole=True, around=("[BEGIN_AUDIO]", "")),
}


class SoundProcessor:
    """Processes the sounds of one model."""

    def __init__(self, model: str, most_seconds: float) -> None:
        """Reads the model's files. Raises NoProcessor."""
        try:
            self._read(model, most_seconds)
        except NoProcessor:
            raise
        except Exception as error:  # files of a model raise whatever comes
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            raise NoProcessor(f"its files do not say how it hears: {reason}") from error

    def _read(self, model: str, most_seconds: float) -> None:
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(model, trust_remote_code=False)
        self._rule = _RULES[config.model_type]
        self._config = config.audio_config
        positions = getattr(self._config, "max_source_positions", None) or self._config.max_position_embeddings
        self._form = mel_form(model, int(self._config.num_mel_bins), 2 * int(positions))
        self._most_seconds = min(most_seconds, self._longest(model))
        token_id = config.audio_token_id
        if token_id is None:
            raise NoProcessor("config.json names no audio_token_id")
        tokenizer = load_tokenizer(model)
        self._token = str(tokenizer.convert_ids_to_tokens(int(token_id)))
        settings = f"{model}\0{config.model_type}\0{self._form}\0{self._most_seconds}\0{self._token}"
        self.facts = Vision(
            placeholder=self._token,
            mark=self._token.join(self._rule.around),
            token_id=int(token_id),
            token=self._token,
            behind_images="",
            behind_prompt="",
            fingerprint=hashlib.blake2b(settings.encode(), digest_size=16).hexdigest(),
            is_sound=True,
            most_sound_bytes=self._most_bytes,
            no_videos="it hears sounds, and sees nothing",
        )

    @property
    def form(self) -> MelForm:
        """The form of the features of a window."""
        return self._form

    def process(self, data: bytes) -> tuple[Arrays, float]:
        """Processes a sound file. Returns its arrays and its seconds. Raises SoundRefused."""
        samples = decoded(data, self._form.rate, self._most_seconds)
        size = self._form.frames * self._form.hop
        count = max(1, -(-len(samples) // size))
        padded = np.pad(samples, (0, count * size - len(samples)))
        frames = -(-len(samples) // self._form.hop) if self._rule.mask else count * self._form.frames
        tokens = self._rule.tokens_of(frames, self._config)
        if tokens < 1:
            raise SoundRefused("is too short for this model: send a longer one")
        arrays: dict[str, NDArray[Any]] = {"pixel_values": self._features(padded, count)}
        if self._rule.mask:
            mask = np.arange(count * self._form.frames) < frames
            arrays[self._rule.mask] = mask.astype(np.int64).reshape(count, -1)
        return Arrays(arrays, self._token * tokens), len(samples) / self._form.rate

    def _features(self, padded: NDArray[np.float32], count: int) -> NDArray[np.float32]:
        """The features [windows, bins, frames] of whole windows."""
        if not self._rule.is_whole:
            return np.stack([log_mel(part, self._form) for part in np.split(padded, count)])
        features = log_mel(padded, self._form)
        return np.ascontiguousarray(features.reshape(len(features), count, -1).transpose(1, 0, 2))

    @property
    def _most_bytes(self) -> int:
        """Bytes of the arrays of the longest sound: float32 features, and a mask of int64."""
        windows = math.ceil(self._most_seconds / self._form.seconds)
        return windows * self._form.frames * (4 * self._form.bins + 8 * bool(self._rule.mask))

    def _longest(self, model: str) -> float:
        """Seconds of the longest sound, in whole windows."""
        if not self._rule.longest:
            return self._form.seconds
        named = float(read_json(model, "processor_config.json").get("max_audio_len", self._rule.longest))
        return max(1.0, named // self._form.seconds) * self._form.seconds
