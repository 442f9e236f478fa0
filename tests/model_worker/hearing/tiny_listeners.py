"""Tiny random models that hear, one for each family, with their files: a window is two seconds long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from tests.api_server.conftest import byte_level_backend

RATE = 16_000
BINS = 8
SECONDS = 2
POSITIONS = 50 * SECONDS
HIDDEN = 32
# Most tokens of a prompt and its answer.
LONGEST = 256
TOKENS = 8

Sound = NDArray[np.float32]

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_TOWER: dict[str, Any] = {
    "num_mel_bins": BINS,
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'audio' %}SOUND{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _qwen2_audio(size: int, token: int) -> Any:
    tower = {"num_mel_bins": BINS, "d_model": HIDDEN, "encoder_layers": 2, "encoder_attention_heads": 2}
    config = transformers.Qwen2AudioConfig(
        audio_config=tower | {"encoder_ffn_dim": 48, "max_source_positions": POSITIONS},
        text_config=_TEXT | {"model_type": "qwen2", "vocab_size": size},
        audio_token_index=token,
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def _voxtral(size: int, token: int) -> Any:
    config = transformers.VoxtralConfig(
        audio_config=_TOWER | {"max_source_positions": POSITIONS},
        text_config=_TEXT | {"model_type": "llama", "vocab_size": size},
        audio_token_id=token,
    )
    return transformers.VoxtralForConditionalGeneration(config)


def _glmasr(size: int, token: int) -> Any:
    config = transformers.GlmAsrConfig(
        audio_config=_TOWER | {"max_position_embeddings": POSITIONS},
        text_config=_TEXT | {"model_type": "llama", "vocab_size": size},
        audio_token_id=token,
        tie_word_embeddings=False,
    )
    return transformers.GlmAsrForConditionalGeneration(config)


def _audioflamingo3(size: int, token: int) -> Any:
    config = transformers.AudioFlamingo3Config(
        audio_config=_TOWER | {"max_source_positions": POSITIONS},
        text_config=_TEXT | {"model_type": "qwen2", "vocab_size": size},
        audio_token_id=token,
    )
    return transformers.AudioFlamingo3ForConditionalGeneration(config)


@dataclass(frozen=True)
class Family:
    """A family's model, its token for sounds, and the text that its templates write."""

    make: Callable[[int, int], Any]
    token: str
    mark: str
    # The longest sound that a test gives to it.
    seconds: float = 4.7


FAMILIES = {
    "qwen2_audio": Family(_qwen2_audio, "<|AUDIO|>", "<|audio_bos|><|AUDIO|><|audio_eos|>", float(SECONDS)),
    "voxtral": Family(_voxtral, "[AUDIO]", "[BEGIN_AUDIO][AUDIO]"),
    "glmasr": Family(_glmasr, "<|pad|>", "<|begin_of_audio|><|pad|><|end_of_audio|>"),
    "audioflamingo3": Family(_audioflamingo3, "<sound>", "<sound>"),
}


@dataclass
class Listening:
    """A tiny model that hears in a directory, and the same in this process."""

    name: str
    path: Path
    model: Any
    tokenizer: PreTrainedTokenizerFast
    extractor: WhisperFeatureExtractor

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]

    @property
    def token_id(self) -> int:
        found: Any = self.tokenizer.convert_tokens_to_ids(self.family.token)
        return int(found)

    def heard(self, sound: Sound) -> tuple[dict[str, Any], int]:
        """The arrays of a sound and the number of its tokens, by transformers' processor."""
        if self.name == "voxtral":
            # Its constructor wants a package of Mistral's.
            self_like: Any = SimpleNamespace(feature_extractor=self.extractor)
            size = SECONDS * RATE
            options = {"sampling_rate": RATE, "padding": True, "truncation": False, "return_tensors": "pt"}
            features = VoxtralProcessor._retrieve_input_features(
                self_like, [sound], 2 * POSITIONS, **options, pad_to_multiple_of=size
            )
            return {"input_features": features}, len(features) * POSITIONS // 4
        names = {"qwen2_audio": "Qwen2Audio", "glmasr": "GlmAsr", "audioflamingo3": "AudioFlamingo3"}
        more = {} if self.name == "qwen2_audio" else {"audio_token": self.family.token}
        made = getattr(transformers, f"{names[self.name]}Processor")(self.extractor, self.tokenizer, **more)
        found = made(text=[self.family.token], audio=[sound], sampling_rate=RATE, return_tensors="pt")
        count = int((found["input_ids"] == self.token_id).sum())
        return {name: value for name, value in found.items() if "features" in name or "feature_" in name}, count

    def prompt(self, texts: list[str], counts: list[int]) -> list[int]:
        """Texts with a sound of so many tokens between each two."""
        marks = [self.family.mark.replace(self.family.token, self.family.token * count) for count in counts]
        text = "".join(text + mark for text, mark in zip(texts, [*marks, ""], strict=True))
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def answer(self, texts: list[str], sounds: list[Sound], tokens: int = TOKENS) -> list[int]:
        """The tokens that transformers generates."""
        heard = [self.heard(sound) for sound in sounds]
        ids = torch.tensor([self.prompt(texts, [count for _, count in heard])])
        joined = {name: torch.cat([arrays[name] for arrays, _ in heard]) for name in (heard[0][0] if heard else ())}
        with torch.no_grad():
            found = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **joined,
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        answer: list[int] = found[0, ids.shape[1] :].tolist()
        return answer

    def text(self, ids: list[int]) -> str:
        """The text of an answer up to its end."""
        end: Any = self.tokenizer.eos_token_id
        return str(self.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids, skip_special_tokens=True))


def made(name: str, path: Path, seed: int = 7) -> Listening:
    """Write a model whose weights follow from the seed."""
    family = FAMILIES[name]
    backend = byte_level_backend()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>", "<sound>"]
    names += ["[BEGIN_AUDIO]", "[AUDIO]", "<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"]
    names += ["[INST]", "[/INST]", "[TRANSCRIBE]"] if name == "voxtral" else []
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = _PARTS.replace("SOUND", family.mark)
    tokenizer.save_pretrained(path)
    extractor = WhisperFeatureExtractor(feature_size=BINS, chunk_length=SECONDS)
    extractor.save_pretrained(path)
    token: Any = backend.token_to_id(family.token)
    model = family.make(len(tokenizer), token)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.5 if "embed" in key else 0.2))
    model.eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    (path / "generation_config.json").write_text("{}")
    model.set_attn_implementation("eager")
    return Listening(name, path, model, tokenizer, extractor)
