"""A codec that turns the codes of speech tokens into sound, window by window, and clips of sound into codes.

A `PoolingModel` whose values of a text are the samples of a window. What a window gives is equal to that part of the
sound of all frames, because frames around it go with it: how many they must be is measured when the codec is loaded.
Knows codes and samples; knows neither the model that generates the codes nor requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from interfaces import ClipContext, CodecContext, CodecFacts, PoolingContext, PoolingTask
from model_worker.speech.encode_clips import Encode
from shared.codec_files import CodecFiles

# Frames on each side of the place where codes are changed to see which samples change: few at first, since that takes
# time. A codec whose samples change farther away than the most is decoded in one piece.
_MEASURED_FRAMES = (8, 16, 32, 64)
# Part of the largest change of a sample that another change must exceed, so that it counts.
_NOTICED = 1e-6
# Frames that are added to what was measured: other codes may reach somewhat farther.
_SPARE_FRAMES = 2

# Makes samples of the codes of each codebook and of the place of their first frame.
Decode = Callable[[list[Tensor], int], Tensor]


@dataclass(frozen=True, eq=False)
class SpeechCodec:
    """`decode` makes the samples [samples] of the codes of each codebook, and of the place of their first frame.

    `encode` makes codes of samples; None where voices are not taken from clips.
    """

    decode: Decode
    files: CodecFiles
    # The codebook of each code of a frame, in the order of the speech tokens.
    codebooks: tuple[int, ...]
    device: torch.device
    weights: torch.dtype
    # Most tokens of the model's texts. Windows may be longer.
    max_model_len: int
    encode: Encode | None = None

    @property
    def tasks(self) -> frozenset[PoolingTask]:
        encodes = () if self.encode is None else (PoolingTask.ENCODE_SPEECH,)
        return frozenset({PoolingTask.DECODE_SPEECH, *encodes})

    @property
    def hidden_size(self) -> int:
        """Sound has no width."""
        return 0

    @property
    def labels(self) -> list[str]:
        return []

    @property
    def architecture(self) -> str:
        return self.files.kind

    @property
    def dtype(self) -> str:
        return str(self.weights).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        return self.files.codebook_size

    @property
    def backend(self) -> str:
        return self.files.kind

    @cached_property
    def facts(self) -> CodecFacts:
        """The rate, and the frames that a window needs around it, which are measured now."""
        for half in _MEASURED_FRAMES:
            facts = self._measured(half)
            if max(facts.left, facts.right) <= half:
                return facts
        return CodecFacts(facts.sample_rate, facts.frame_samples, -1, -1)

    def _measured(self, half: int) -> CodecFacts:
        """Change the codes on one side of the middle of so many frames on each side, and see which samples change on
        the other side."""
        generator = np.random.default_rng(0)
        frames = generator.integers(0, self.vocab_size, (2 * half, len(self.codebooks)))
        others = generator.integers(0, self.vocab_size, frames.shape)
        before = np.concatenate([others[:half], frames[half:]])
        behind = np.concatenate([frames[:half], others[half:]])
        sound, changed_before, changed_behind = (self._samples(codes) for codes in (frames, before, behind))
        each = round(len(sound) / len(frames))
        middle = half * each
        before_differs, behind_differs = np.abs(sound - changed_before), np.abs(sound - changed_behind)
        largest = float(max(before_differs.max(), behind_differs.max()))
        if not 0 < largest < np.inf:
            raise ValueError("its codes do not change the samples, or these are not finite: copy its weights again")
        later = np.flatnonzero(before_differs > _NOTICED * largest)
        earlier = np.flatnonzero(behind_differs > _NOTICED * largest)
        left = -(-(int(later[-1]) + 1 - middle) // each) if len(later) else 0
        right = -(-(middle - int(earlier[0])) // each) if len(earlier) else 0
        return CodecFacts(self.files.sample_rate, each, max(0, left) + _SPARE_FRAMES, max(0, right) + _SPARE_FRAMES)

    @torch.inference_mode()
    def run(self, texts: PoolingContext) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return the samples of all windows, one after another, and their number for each; or the codes of a clip.
        ValueError for what the codec cannot do."""
        if isinstance(texts, ClipContext):
            return self._encoded(texts.samples)
        if not isinstance(texts, CodecContext):
            raise ValueError(f"task {texts.task.value!r} is not what a codec does: it decodes speech tokens")
        if texts.width != len(self.codebooks):
            raise ValueError(f"width must be {len(self.codebooks)}, the codes of a frame, got {texts.width}")
        if (largest := int(texts.tokens.max())) >= self.vocab_size:
            raise ValueError(f"code {largest} is outside of the codebooks: codes are 0 to {self.vocab_size - 1}")
        sounds = [self._window(codes.reshape(-1, texts.width), texts) for codes in texts.texts()]
        lengths = np.array([len(sound) for sound in sounds], np.int32)
        return np.concatenate(sounds)[:, None], lengths

    def _encoded(self, samples: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return the codes of a clip [frames x codes, 1], and their number. Each is below 2^24, so a float holds it."""
        if self.encode is None:
            raise ValueError("voices by clip are off: start the server with --voice-clips")
        books = self.encode(torch.from_numpy(samples.copy()).to(self.device)).cpu().numpy()
        codes: NDArray[np.float32] = books[list(self.codebooks)].T.reshape(-1, 1).astype(np.float32)
        return codes, np.array([len(codes)], np.int32)

    def _window(self, frames: NDArray[np.int32], context: CodecContext) -> NDArray[np.float32]:
        """Return the samples of the frames [frames, codes] between those that only surround them."""
        each = self.facts.frame_samples
        sound = self._samples(frames, context.first_frame)
        # Without frames behind them the last ones end where the codec ends them.
        end = (len(frames) - context.right) * each if context.right else len(sound)
        if not np.isfinite(sound).all():
            raise ValueError("the samples of the codec are not finite: its weights are broken")
        return sound[context.left * each : end]

    @torch.inference_mode()
    def _samples(self, frames: NDArray[np.integer], first_frame: int = 0) -> NDArray[np.float32]:
        books = np.array(self.codebooks)
        codes = [
            torch.from_numpy(frames[:, books == book].reshape(-1).astype(np.int64)).to(self.device)
            for book in range(books.max() + 1)
        ]
        samples: NDArray[np.float32] = self.decode(codes, first_frame).float().cpu().numpy()
        return samples


def transformers_decode(model: Any) -> Decode:
    """Return the decoding of one of transformers' codecs."""

    def decode(codes: list[Tensor], _: int) -> Tensor:
        found: Tensor = model.decode(audio_codes=torch.stack(codes)[None]).audio_values
        return found.reshape(-1)

    return decode
