"""Log-mel spectrograms as Whisper's feature extractor in transformers makes them. Runs in the media process only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.recogniser_files import MelForm

# The mel scale ends here, whatever the rate.
_HIGHEST_HZ = 8000.0
_FLOOR = 1e-10
# Below the loudest value, in powers of ten, all is silence.
_RANGE = 8.0
# Frames that are transformed at a time: 13 MB.
_PIECE = 4096


def log_mel(samples: NDArray[np.float32], form: MelForm) -> NDArray[np.float32]:
    """The features [bins, frames] of a sound.

    One that is shorter than a window is padded with silence to a whole one; a longer one is taken as it is.
    """
    from transformers.audio_utils import mel_filter_bank

    padded = np.pad(samples, (0, max(0, form.frames * form.hop - len(samples))))
    filters = mel_filter_bank(
        num_frequency_bins=1 + form.fft // 2,
        num_mel_filters=form.bins,
        min_frequency=0.0,
        max_frequency=_HIGHEST_HZ,
        sampling_rate=form.rate,
        norm="slaney",
        mel_scale="slaney",
    )
    waves = np.pad(padded, form.fft // 2, mode="reflect")
    views = np.lib.stride_tricks.sliding_window_view(waves, form.fft)[:: form.hop]
    frames = len(padded) // form.hop
    hann = np.hanning(form.fft + 1)[:-1]
    features = np.empty((form.bins, frames), np.float32)
    for first in range(0, frames, _PIECE):
        part = slice(first, min(first + _PIECE, frames))
        # Spectra are rounded as there.
        spectra = np.fft.rfft(views[part] * hann).astype(np.complex64)
        power = np.abs(spectra, dtype=np.float64) ** 2
        features[:, part] = np.log10(np.maximum(_FLOOR, filters.T @ power.T))
    np.maximum(features, features.max() - _RANGE, out=features)
    features += 4.0
    features /= 4.0
    return features
