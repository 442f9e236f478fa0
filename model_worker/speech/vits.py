"""A loaded VITS model, and how the sentences of a request become sound.

A sentence is one forward pass of transformers' modules, by itself: a pass over several would pad them, and padding
changes the last samples of the shorter ones. Its noise is what torch draws after `torch.manual_seed` of the sentence's
seed, so that transformers gives the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import PoolingContext, PoolingTask, SynthesisContext

# Longest sound of one sentence. A model that makes more of it does not know what it reads.
MOST_SECONDS = 120.0


class TooLong(ValueError):
    """A sentence whose sound would be longer than MOST_SECONDS."""


@dataclass(frozen=True, eq=False)
class VitsSpeaker:
    """A `PoolingModel` whose values of a text are the samples of its sound, f32[samples, 1]."""

    model: Any
    architecture: str
    device: torch.device
    max_model_len: int
    vocab_size: int
    speakers: int

    @property
    def tasks(self) -> frozenset[PoolingTask]:
        return frozenset({PoolingTask.SPEAK})

    @property
    def hidden_size(self) -> int:
        """Sound has no width."""
        return 0

    @property
    def labels(self) -> list[str]:
        return []

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def sample_rate(self) -> int:
        """Samples a second."""
        return int(self.model.config.sampling_rate)

    @property
    def weights(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def backend(self) -> str:
        return "transformers, a sentence a pass"

    @property
    def waits_for_kernels(self) -> bool:
        """No kernels of ours are used."""
        return False

    @torch.inference_mode()
    def run(self, texts: PoolingContext) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return the samples of all sentences, one after another, and their number for each. ValueError for what the
        model cannot speak."""
        if not isinstance(texts, SynthesisContext):
            raise ValueError(f"task {texts.task.value!r} is not what {self.architecture} does: it speaks")
        if texts.voice >= self.speakers:
            raise ValueError(f"voice must be a speaker's number from 0 to {self.speakers - 1}, got {texts.voice}")
        if (largest := int(texts.tokens.max())) >= self.vocab_size:
            raise ValueError(f"token id {largest} is outside of the vocabulary: ids are 0 to {self.vocab_size - 1}")
        sounds = [
            self._speak(tokens, seed, texts.voice, texts.speed)
            for tokens, seed in zip(texts.texts(), texts.seeds.tolist(), strict=True)
        ]
        lengths = np.array([len(sound) for sound in sounds], np.int32)
        return np.concatenate(sounds)[:, None], lengths

    def _speak(self, tokens: NDArray[np.int32], seed: int, voice: int, speed: float) -> NDArray[np.float32]:
        """Return the samples of one sentence."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None].to(self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        rate = self._speaking_rate(speed)
        check = self.model.duration_predictor.register_forward_hook(partial(self._refuse_long, rate))
        try:
            with torch.random.fork_rng(devices):
                torch.manual_seed(seed)
                found = self.model(input_ids=ids, speaker_id=voice if self.speakers > 1 else None, speaking_rate=rate)
        finally:
            check.remove()
        samples: NDArray[np.float32] = found.waveform[0].float().cpu().numpy()
        if not np.isfinite(samples).all():
            raise ValueError(f"the samples of {self.architecture} are not finite: its weights are broken")
        return samples

    def _speaking_rate(self, speed: float) -> float:
        return float(self.model.config.speaking_rate) * speed

    def _refuse_long(self, rate: float, _module: Any, _arguments: Any, log_duration: torch.Tensor) -> None:
        """Raise TooLong before memory is taken for a sound that no sentence has."""
        frames = float(torch.ceil(torch.exp(log_duration) / rate).sum())  # as the model rounds them
        seconds = frames * float(np.prod(self.model.config.upsample_rates)) / self.model.config.sampling_rate
        if not seconds <= MOST_SECONDS:
            raise TooLong(
                f"the sound of a sentence would take {seconds:.0f} s, and {MOST_SECONDS:g} s are possible: send "
                "shorter sentences, or a higher speed"
            )
