"""Images within one process: the server's painter as a pipeline, whose requests are painted together.

Knows contexts of images. Does not know how pixels are computed (model_worker/pixels/ does).
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from interfaces import (
    GenerationOutput,
    GenerationStatus,
    OutputImageContent,
    PaintingContext,
    Pipeline,
    PixelGenerationInputs,
    RequestID,
    TokenDetails,
    Usage,
)
from model_worker.pixels.load import load_painter
from model_worker.pixels.painter import Painter

# Images that are painted at once.
TOGETHER = 8


class PixelPipeline(Pipeline[PixelGenerationInputs[PaintingContext], GenerationOutput]):
    """Do not use it from two threads at once."""

    def __init__(self, painter: Painter) -> None:
        self._painter = painter

    @classmethod
    def load(cls, model: str | Path, *, device: str = "cpu", dtype: str = "auto") -> PixelPipeline:
        """Load a directory or hub name. ValueError says why a pipeline cannot be used."""
        return cls(load_painter(model, dtype, device))

    def paint(self, contexts: list[PaintingContext]) -> list[list[NDArray[np.float32]]]:
        """Return the images of each context, f32[height, width, 3] between 0 and 1. ValueError for what cannot be
        painted."""
        waiting = deque((i, j) for i, context in enumerate(contexts) for j in range(len(context)))
        places: dict[int, tuple[int, int]] = {}
        found: dict[tuple[int, int], NDArray[np.float32]] = {}
        try:
            while waiting or len(self._painter):
                while waiting and len(self._painter) < TOGETHER:
                    i, j = waiting.popleft()
                    places[len(places)] = (i, j)
                    self._painter.begin(len(places) - 1, contexts[i].part(j, j + 1))
                made = self._painter.advance(list(places))
                if made.errors:
                    raise ValueError(next(iter(made.errors.values())))
                found.update({places[row]: image for row, image in made.images.items()})
        finally:
            self._painter.forget()
        return [
            [found[i, j].reshape(context.height, context.width, 3) for j in range(len(context))]
            for i, context in enumerate(contexts)
        ]

    def execute(self, inputs: PixelGenerationInputs[PaintingContext]) -> dict[RequestID, GenerationOutput]:
        """Return all images of each context, as PNG. ValueError for one that cannot be painted: then none is."""
        painted = self.paint(list(inputs.batch.values()))
        return {
            name: _output(name, inputs.batch[name], images) for name, images in zip(inputs.batch, painted, strict=True)
        }

    def release(self, request_id: RequestID) -> None:
        """Nothing is kept between calls."""


def _output(name: RequestID, context: PaintingContext, images: list[NDArray[np.float32]]) -> GenerationOutput:
    tokens = int(context.lengths[0])
    patches = context.patches * len(images)
    return GenerationOutput(
        request_id=name,
        final_status=GenerationStatus.END_OF_SEQUENCE,
        output=[OutputImageContent.from_numpy((image * 255).round().astype(np.uint8)) for image in images],
        usage=Usage(
            input_tokens=tokens,
            output_tokens=patches,
            total_tokens=tokens + patches,
            input_tokens_details=TokenDetails(text=tokens),
            output_tokens_details=TokenDetails(image=patches),
        ),
    )
