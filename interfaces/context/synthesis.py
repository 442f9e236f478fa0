"""The context of sentences to be spoken by a model that speaks each of them in one forward pass.

The samples of a sentence depend on its tokens, its seed and the options alone, so a sentence that was lost with its
worker is spoken again as it was. Knows token ids and seeds; knows neither models nor sound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from interfaces.context.pooling import PoolingContext, PoolingTask
from interfaces.wire.codec import I64


@dataclass(kw_only=True, eq=False)
class SynthesisContext(PoolingContext):
    """The sentences of one request, in the order in which they are heard.

    `seeds` has the seed of each sentence's noise. `voice` is the number of a speaker. `speed` multiplies the model's
    own speaking rate. ValueError when the values contradict each other, also after a journey over the wire.
    """

    wire_tag: ClassVar[str] = "synthesis"

    task: PoolingTask = PoolingTask.SPEAK
    seeds: I64
    voice: int = 0
    speed: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.seeds, np.ndarray) or self.seeds.dtype != np.int64 or self.seeds.shape != (len(self),):
            raise ValueError(f"seeds must have one int64 for each of the {len(self)} texts, got {self.seeds!r:.80}")
        if self.seeds.min() < 0:
            raise ValueError(f"seeds must be at least 0, got {int(self.seeds.min())}")
        if self.voice < 0:
            raise ValueError(f"voice must be at least 0, got {self.voice}")
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise ValueError(f"speed must be above 0, got {self.speed}")

    @property
    def options(self) -> tuple[object, ...]:
        return *super().options, self.voice, self.speed

    @property
    def token_cost(self) -> float:
        """Slow speech has more samples for each token."""
        return 1 / self.speed

    def _further_columns(self, chosen: slice | NDArray[np.bool_]) -> dict[str, Any]:
        return {"seeds": self.seeds[chosen]}

    @classmethod
    def _joined_columns(cls, contexts: Sequence[Self]) -> dict[str, Any]:
        return {"seeds": np.concatenate([context.seeds for context in contexts])}
