"""The seam between the one-shot lane of a worker and the model that computes its texts."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from interfaces.context.pooling import PoolingContext, PoolingTask


class PoolingModel(Protocol):
    """A loaded model that makes values of texts: an encoder, or a decoder whose hidden states are pooled."""

    @property
    def tasks(self) -> frozenset[PoolingTask]:
        """The tasks that this checkpoint can do."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """The most tokens that a text may have."""
        ...

    @property
    def hidden_size(self) -> int:
        """The width of a vector; 0 for a model that only classifies."""
        ...

    @property
    def labels(self) -> list[str]:
        """The names of the labels, in the order of their numbers; empty for a model that only embeds."""
        ...

    @property
    def architecture(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def backend(self) -> str:
        """What computes the texts, in words."""
        ...

    def run(self, texts: PoolingContext) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return the values of all texts, f32[rows, width], and the rows of each text.

        The values of a text depend on its neighbours by less than 1e-5. ValueError for texts that the model cannot
        compute; any other error ends the worker.
        """
        ...
