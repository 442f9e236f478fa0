"""How transformers' codecs turn the samples of a clip into codes, with what their feature extractors do before.

Knows the inputs of each codec. Does not know whose voice it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import SeamlessM4TFeatureExtractor

# Makes codes i64[codebooks, frames] of samples f32[n].
Encode = Callable[[Tensor], Tensor]

# Half a frame of X-Codec 2 at 16 kHz: silence that its features have on both sides.
_HALF_FRAME = 160


def encoder_of(kind: str, model: Any) -> Encode:
    """Return what encodes by one of transformers' codecs."""
    if kind == "dac":
        return partial(_by_dac, model)
    if kind == "mimi":
        return partial(_by_mimi, model)
    around = _HALF_FRAME if kind == "xcodec2" else 0
    return partial(_by_features, model, SeamlessM4TFeatureExtractor(), around)


def _by_dac(model: Any, samples: Tensor) -> Tensor:
    codes: Tensor = model.encode(_whole_frames(samples, int(model.config.hop_length))[None, None]).audio_codes[0]
    return codes


def _by_mimi(model: Any, samples: Tensor) -> Tensor:
    codes: Tensor = model.encode(samples[None, None]).audio_codes[0]
    return codes


def _by_features(model: Any, extractor: Any, around: int, samples: Tensor) -> Tensor:
    """Encode by X-Codec 2 or NeuCodec, which see a mel spectrogram, too.

    Their own extractors want torchaudio; its spectrogram is Kaldi's, as that of SeamlessM4T is.
    """
    padded = _whole_frames(functional.pad(samples, (0, 1)), _frame(model))
    heard = functional.pad(padded, (around, around)).cpu().numpy()
    features = extractor(heard, sampling_rate=extractor.sampling_rate, return_tensors="pt")["input_features"]
    found = model.encode(padded[None, None], features.to(samples.device))
    codes: Tensor = found.audio_codes[0]
    return codes


def _frame(model: Any) -> int:
    """The samples of a frame of what is encoded."""
    return int(torch.tensor(model.config.downsampling_ratios).prod())


def _whole_frames(samples: Tensor, frame: int) -> Tensor:
    return functional.pad(samples, (0, -len(samples) % frame))
