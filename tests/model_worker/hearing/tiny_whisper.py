"""Tiny random recognisers of Whisper's kind, with a tokenizer: their windows are one second long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperFeatureExtractor
from transformers import WhisperForConditionalGeneration as Whisper

from tests.api_server.conftest import byte_level_backend

RATE = 16_000
POSITIONS = 50
TARGETS = 24
LANGUAGES = ("en", "de", "fr")
_SPECIAL = (
    "<|end|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)


def tiny_whisper(folder: Path, multilingual: bool = True, seed: int = 1) -> Path:
    """Write a recogniser whose weights follow from the seed. Returns its folder."""
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    times = [f"<|{0.02 * i:.2f}|>" for i in range(POSITIONS + 1)]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in times])
    ids: dict[str, Any] = {text: backend.token_to_id(text) for text in (*_SPECIAL, *times)}
    config = WhisperConfig(
        vocab_size=backend.get_vocab_size(),
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=POSITIONS,
        max_target_positions=TARGETS,
        pad_token_id=ids["<|end|>"],
        bos_token_id=ids["<|end|>"],
        eos_token_id=ids["<|end|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = Whisper(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Positions weigh much, so that a transcript does not repeat one token.
            scale = 1.5 if "decoder.embed_positions" in name else 0.4
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            if "layer_norm.weight" in name:
                parameter.fill_(1.0)
    generation: Any = model.generation_config
    # Otherwise transformers drops what is set here when it reads the file.
    generation._from_model_config = False
    generation.no_timestamps_token_id = ids["<|notimestamps|>"]
    generation.prev_sot_token_id = ids["<|startofprev|>"]
    controls = [ids[text] for text in _SPECIAL if text not in ("<|end|>", "<|notimestamps|>")]
    generation.suppress_tokens = [3, 4, 5, *controls]
    generation.begin_suppress_tokens = [10, ids["<|end|>"]]
    generation.max_initial_timestamp_index = 20
    generation.alignment_heads = [[1, 0], [0, 1]]
    generation.max_length = TARGETS
    generation.is_multilingual = multilingual
    if multilingual:
        generation.lang_to_id = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
        generation.task_to_id = {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]}
    model.eval().save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(folder)
    return folder


def load(folder: Path) -> Whisper:
    """transformers' own model of the folder, in float32."""
    model: Any = Whisper.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    loaded: Whisper = model.eval()
    return loaded


def speech(seed: int, seconds: float, rate: int = RATE) -> NDArray[np.float32]:
    """A sound with a spectrum that changes: some tones that come and go, and a little noise."""
    generator = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    sound = 0.01 * generator.standard_normal(len(time))
    for _ in range(6):
        tone = np.sin(2 * np.pi * generator.uniform(100, 3500) * time)
        sound += 0.15 * tone * (np.sin(2 * np.pi * generator.uniform(0.5, 4) * time + generator.uniform(0, 6)) > 0)
    return sound.astype(np.float32)


def features(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """What transformers' extractor makes of a sound in numpy: [bins, frames], padded to a window."""
    extractor: Any = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    padded = np.pad(samples, (0, max(0, RATE - len(samples))))
    found: NDArray[np.float32] = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    return found
