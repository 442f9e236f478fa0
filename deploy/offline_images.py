"""Images within this process: the API server's reading of a description joined to the worker's pipeline.

Knows one pipeline. Knows neither requests nor a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.errors import RequestFailed
from api_server.pixels.reading import MOST_SEED, context_of
from api_server.pixels.wish import Wish
from api_server.text.tokenizer import Tokenizer
from model_worker.pipelines.pixels import PixelPipeline
from shared.pixel_files import MOST_STEPS, PixelFiles
from shared.pooling_files import PoolingFiles

# Options of LLM that pipelines that paint have, too.
_OPTIONS = ("device", "dtype")


class TextPainter:
    """A pipeline that paints. Do not use it from two threads at once."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        """Load the pipeline. ValueError gives the reason when it cannot be."""
        self._files = PixelFiles.read(model)
        self._tokenizer = Tokenizer.load(PoolingFiles.read(model).tokenizer_source)
        self._pipeline = PixelPipeline.load(model, **{name: options[name] for name in _OPTIONS if name in options})

    def paint(self, wish: Wish) -> list[NDArray[np.uint8]]:
        """Paint images [height, width, 3]. ValueError names what is wrong."""
        if wish.seed is not None and not 0 <= wish.seed <= MOST_SEED:
            raise ValueError(f"seed must be from 0 to {MOST_SEED}, got {wish.seed}")
        if wish.count < 1:
            raise ValueError(f"n must be at least 1, got {wish.count}")
        if wish.steps is not None and not 1 <= wish.steps <= MOST_STEPS:
            raise ValueError(f"steps must be from 1 to {MOST_STEPS}, got {wish.steps}")
        try:
            context = context_of(self._files, self._tokenizer, wish)
        except RequestFailed as error:
            raise ValueError(error.message) from None
        (images,) = self._pipeline.paint([context])
        return [(image * 255).round().astype(np.uint8) for image in images]
