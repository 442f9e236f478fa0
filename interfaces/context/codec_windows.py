"""What goes to the codec beside a model that generates speech tokens: windows of codes, which become sound, and clips
of sound, which become codes.

The values depend on the codes, the samples and the options alone, so what was lost with its worker is computed again as
it was. Knows codes, frames and samples; knows no codecs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from interfaces.base.request_id import RequestID
from interfaces.context.pooling import PoolingContext, PoolingTask
from interfaces.wire.codec import F32

# Samples of a clip that weigh as much as a token in limits and fair shares.
_SAMPLES_OF_A_TOKEN = 256


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """A codec of speech tokens: samples a second, and samples of a frame.

    The samples of a frame depend on `left` frames before it and `right` frames behind it. Both are below 0 for a codec
    that must have all frames at once.
    """

    sample_rate: int
    frame_samples: int
    left: int
    right: int

    @property
    def is_whole(self) -> bool:
        """Whether the frames cannot be decoded piece by piece."""
        return self.left < 0 or self.right < 0


@dataclass(kw_only=True, eq=False)
class CodecContext(PoolingContext):
    """Windows of codes: the tokens of a text are those of its frames, one frame after another.

    `width` is the number of codes of a frame. The first `left` and the last `right` frames of a window only surround
    the others, and their samples are left out; a window without frames on the right gives its samples to the end.
    `first_frame` is the place of a window's first frame in the sound. ValueError when the values contradict each
    other, also after a journey over the wire.
    """

    wire_tag: ClassVar[str] = "codec"

    task: PoolingTask = PoolingTask.DECODE_SPEECH
    width: int
    left: int = 0
    right: int = 0
    first_frame: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")
        for name in ("left", "right", "first_frame"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        least = self.width * (self.left + self.right + 1)
        if (self.lengths % self.width).any() or self.lengths.min() < least:
            raise ValueError(
                f"lengths must be multiples of the width {self.width} and at least {least}, for one frame between "
                f"{self.left} on the left and {self.right} on the right, got {self.lengths.tolist()!r:.80}"
            )

    @property
    def options(self) -> tuple[object, ...]:
        return *super().options, self.width, self.left, self.right, self.first_frame


@dataclass(kw_only=True, eq=False)
class ClipContext(PoolingContext):
    """A clip of speech, as samples of one channel at the codec's rate: its codes are wanted, frame by frame in the
    order of the speech tokens.

    Its tokens only weigh. ValueError when the values contradict each other, also after a journey over the wire.
    """

    wire_tag: ClassVar[str] = "clip"

    task: PoolingTask = PoolingTask.ENCODE_SPEECH
    samples: F32

    def __post_init__(self) -> None:
        super().__post_init__()
        samples = self.samples
        if not isinstance(samples, np.ndarray) or samples.dtype != np.float32 or samples.ndim != 1 or not len(samples):
            raise ValueError(f"samples must be a one-dimensional array of float32, got {samples!r:.80}")
        if len(self) != 1:
            raise ValueError(f"lengths must have one clip, got {len(self)}")

    @classmethod
    def of_samples(cls, samples: NDArray[np.float32], request_id: RequestID, model_name: str) -> Self:
        """Make the context of a clip."""
        weight = np.zeros(-(-len(samples) // _SAMPLES_OF_A_TOKEN), np.int32)
        task = PoolingTask.ENCODE_SPEECH
        return cls.of([weight], task, samples=samples, request_id=request_id, model_name=model_name)

    @property
    def options(self) -> tuple[object, ...]:
        """Clips are encoded one by one."""
        return *super().options, id(self.samples)
