"""Runs denoising passes for the worker's loop.

Knows messages and rows; does not know what paints.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from interfaces import Handover, KeptStep, PixelPreview, PixelResult, PixelStep, PooledValues
from model_worker.one_shot import Computed, OneShotRunner
from model_worker.pixels.painter import Painter


class PixelRunner(OneShotRunner):
    """Begins, advances and drops images as the scheduler says.

    A `ValueError` of the painter fails the image that it is about. Any other error ends the worker.
    """

    takes = PixelStep

    def __init__(self, painter: Painter, index: int, epoch: int, handover: Handover | None = None) -> None:
        super().__init__(index, epoch, handover)
        self._painter = painter
        # The scheduler whose images these are.
        self._incarnation: int | None = None

    def forget(self) -> None:
        """Drop all images: what comes next is for another registration."""
        self._painter.forget()

    def begin(self, step: PixelStep) -> Computed[PixelResult]:
        """Run a pass. The scheduler sends the next one meanwhile where passes are short."""
        return Computed(self.run(step))

    def run(self, step: PixelStep) -> PixelResult:
        begun = time.monotonic()
        if step.incarnation != self._incarnation:
            self._incarnation = step.incarnation
            self._painter.forget()
        self._painter.drop(step.drop.tolist())
        passes: list[int] = []
        errors: dict[int, str] = {}
        for join in step.joins:
            try:
                passes.append(self._painter.begin(join.row, join.context, join.kept))
            except ValueError as error:
                passes.append(0)
                errors[join.row] = str(error)
        made = self._painter.advance(step.rows.tolist())
        previews = [PixelPreview(row, number, self._handed_over(pixels)) for row, number, pixels in made.previews]
        return PixelResult(
            incarnation=step.incarnation,
            epoch=self._epoch,
            index=self._index,
            number=step.number,
            finished=np.array(list(made.images), np.int32),
            images=[self._handed_over(image) for image in made.images.values()],
            previews=previews,
            passes=np.array(passes, np.int32),
            errors=errors | made.errors,
            kept=[KeptStep(*kept) for kept in made.kept],
            device_us=max(1, int((time.monotonic() - begun) * 1e6)),
        )

    def _handed_over(self, image: NDArray[np.float32]) -> PooledValues:
        """The pixels of an image as they travel."""
        values = image if self._handover is None else self._handover.give(image)
        return PooledValues(values, np.array([len(image)], np.int32))
