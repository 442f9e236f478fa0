"""What the JSON files of a speech recogniser say: whether it is one, its special tokens, its rules and its features.

Knows the files of Whisper's kind of checkpoint. Knows neither torch nor transformers' models, so that the API server
reads the same facts as the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.tokenizer_files import read_json

# Types of models that transcribe: encoder-decoders whose encoder reads a log-mel spectrogram.
SPEECH_TYPES = ("whisper",)
# The name of the logits processor that holds a transcript to its rules (model_worker/hearing/rules.py).
RULES = "transcript"
# The number of tokens that stand for a clip is a multiple of this, so that the keys of a clip fill whole KV blocks.
_ALIGNMENT = 256
# Seconds between two timestamps.
TIME_PRECISION = 0.02


def clip_tokens(source_positions: int) -> int:
    """Return the number of tokens at the start of a sequence that stand for a clip of so many encoder positions."""
    return -(-source_positions // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class MelForm:
    """The form of a log-mel spectrogram."""

    bins: int
    rate: int = 16_000
    hop: int = 160
    fft: int = 400
    # Frames of one window of the encoder.
    frames: int = 3000

    @property
    def seconds(self) -> float:
        """Length of a window."""
        return self.frames * self.hop / self.rate


@dataclass(frozen=True)
class RecogniserFiles:
    """The facts of one checkpoint. Ids are token ids; `languages` have them by code, such as `en`."""

    mel: MelForm
    source_positions: int
    target_positions: int
    vocab_size: int
    start: int
    end: int
    # Stands for a clip in the tokens of a request.
    placeholder: int
    no_timestamps: int | None
    previous: int | None
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    suppressed: tuple[int, ...] = ()
    suppressed_at_begin: tuple[int, ...] = ()
    # The latest first timestamp, counted from 0.
    latest_first: int | None = None
    # Heads of the decoder, as (layer, head), whose attention says when a token is spoken; and how it is smoothed.
    alignment_heads: tuple[tuple[int, int], ...] = ()
    median_filter_width: int = 7

    @classmethod
    def read(cls, source: str, token_of: Callable[[str], int | None]) -> RecogniserFiles | None:
        """Read a checkpoint; None for one that is no recogniser. ValueError names the file and the field.

        `token_of` gives the id of a token by its text, or None. Older files name no ids.
        """
        config = read_json(source, "config.json")
        if not is_speech(config):
            return None
        return _files(source, config, token_of)

    @property
    def clip_tokens(self) -> int:
        return clip_tokens(self.source_positions)

    @property
    def first_timestamp(self) -> int:
        """Id of the timestamp of 0 s; beyond all tokens where there are no timestamps."""
        return self.vocab_size if self.no_timestamps is None else self.no_timestamps + 1

    @property
    def no_speech(self) -> int | None:
        """Id of the token that stands for silence."""
        return None if self.no_timestamps is None else self.no_timestamps - 1


def is_speech(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a recogniser."""
    return config.get("model_type") in SPEECH_TYPES and config.get("is_encoder_decoder") is not False


def mel_form(source: str, bins: int, frames: int) -> MelForm:
    """Read the form of a checkpoint's features. ValueError names a field that is wrong."""
    form = read_json(source, "preprocessor_config.json")
    # A processor of today has it within its own file.
    form = form or read_json(source, "processor_config.json").get("feature_extractor") or {}
    return MelForm(
        bins=bins,
        rate=_whole(form, "sampling_rate", 16_000),
        hop=_whole(form, "hop_length", 160),
        fft=_whole(form, "n_fft", 400),
        frames=frames,
    )


def _files(source: str, config: Mapping[str, Any], token_of: Callable[[str], int | None]) -> RecogniserFiles:
    generation = read_json(source, "generation_config.json")
    positions = _whole(config, "max_source_positions", 1500)

    def named(field: str, text: str) -> int | None:
        given = generation.get(field)
        return given if isinstance(given, int) else token_of(text)

    start = generation.get("decoder_start_token_id", config.get("decoder_start_token_id"))
    start = token_of("<|startoftranscript|>") if start is None else start
    end = generation.get("eos_token_id", config.get("eos_token_id"))
    if not isinstance(start, int) or not isinstance(end, int):
        raise ValueError(
            f"generation_config.json of {source} must have decoder_start_token_id and eos_token_id, got {start!r} and "
            f"{end!r}: take the file of the original checkpoint"
        )
    languages = {str(text).strip("<|>"): int(token) for text, token in (generation.get("lang_to_id") or {}).items()}
    return RecogniserFiles(
        mel=mel_form(source, _whole(config, "num_mel_bins", 80), 2 * positions),
        source_positions=positions,
        target_positions=_whole(config, "max_target_positions", 448),
        vocab_size=_whole(config, "vocab_size", 51_865),
        start=start,
        end=end,
        placeholder=int(config.get("pad_token_id") or 0),
        no_timestamps=named("no_timestamps_token_id", "<|notimestamps|>"),
        previous=named("prev_sot_token_id", "<|startofprev|>"),
        languages=languages,
        tasks={str(name): int(token) for name, token in (generation.get("task_to_id") or {}).items()},
        suppressed=_ids(generation, config, "suppress_tokens"),
        suppressed_at_begin=_ids(generation, config, "begin_suppress_tokens"),
        latest_first=generation.get("max_initial_timestamp_index"),
        alignment_heads=alignment_heads(generation),
        median_filter_width=_whole(config, "median_filter_width", 7),
    )


def alignment_heads(generation: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the heads that a generation_config.json names; none for one that transformers takes for a model's."""
    if generation.get("_from_model_config"):
        return ()
    return tuple((int(layer), int(head)) for layer, head in generation.get("alignment_heads") or ())


def _whole(values: Mapping[str, Any], name: str, usual: int) -> int:
    value = values.get(name, usual)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"the checkpoint's {name} must be a whole number of at least 1, got {value!r}")
    return value


def _ids(generation: Mapping[str, Any], config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    found = generation.get(name, config.get(name)) or []
    return tuple(int(token) for token in found if int(token) >= 0)
