"""Runs batches of texts on a pooling model, for the worker's loop.

Knows batches and values; does not know what computes them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from interfaces import Batch, BatchResult, Handover, PooledValues, PoolingContext, PoolingModel, SharedMemoryArray
from model_worker.execution.base import Counters

# Bytes of the values of one part that a message may hold: the others of its batch need room, too.
MOST_INLINE_BYTES = 200 << 20

_Result = TypeVar("_Result")


class Computed(Generic[_Result]):
    """A result, in the form of a launched step."""

    done = True

    def __init__(self, result: _Result) -> None:
        self._result = result

    def result(self) -> _Result:
        return self._result


class OneShotRunner:
    """What runners of batches and of passes share.

    With a `handover` large values go through shared memory, to be removed by their reader.
    """

    def __init__(self, index: int, epoch: int, handover: Handover | None) -> None:
        self._index = index
        self._epoch = epoch
        self._handover = handover

    @property
    def counters(self) -> Counters:
        """Nothing is guessed here."""
        return Counters()

    def rest(self) -> None:
        """There is nothing to prepare."""

    def beat(self) -> None:
        """Remove values that no reader has taken for long."""
        if self._handover is not None:
            self._handover.forget_old()

    def forget(self) -> None:
        """Nothing is left behind."""


class TextRunner(OneShotRunner):
    """Computes the texts of batches, those with equal options together.

    A `ValueError` of the model fails the part that it is about. Any other error ends the worker.
    """

    takes = Batch

    def __init__(self, model: PoolingModel, index: int, epoch: int, handover: Handover | None = None) -> None:
        super().__init__(index, epoch, handover)
        self._model = model

    def begin(self, batch: Batch) -> Computed[BatchResult]:
        """Compute a batch. Nothing is gained by launching it before the next one is here."""
        return Computed(self.run(batch))

    def run(self, batch: Batch) -> BatchResult:
        begun = time.monotonic()
        parts: list[PooledValues | None] = [None] * len(batch.parts)
        errors: dict[int, str] = {}
        groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for place, part in enumerate(batch.parts):
            groups[type(part), *part.options].append(place)
        for places in groups.values():
            for place, found in zip(places, self._run_group([batch.parts[place] for place in places]), strict=True):
                handed = self._handed_over(found) if isinstance(found, PooledValues) else found
                if isinstance(handed, PooledValues):
                    parts[place] = handed
                else:
                    errors[place] = handed
        device_us = max(1, int((time.monotonic() - begun) * 1e6))
        return BatchResult(batch.incarnation, self._epoch, self._index, batch.number, parts, errors, device_us)

    def _handed_over(self, values: PooledValues) -> PooledValues | str:
        """The values as they travel, or the reason why they cannot."""
        if self._handover is not None:
            values = PooledValues(self._handover.give(values.array), values.lengths)
        if isinstance(values.values, SharedMemoryArray) or values.values.nbytes <= MOST_INLINE_BYTES:
            return values
        return (
            f"the values take {values.values.nbytes} bytes, and {MOST_INLINE_BYTES} can be sent without shared memory: "
            "send shorter texts, or give the server more shared memory"
        )

    def _run_group(self, parts: Sequence[PoolingContext]) -> list[PooledValues | str]:
        """The values of parts with equal options, or the reason why a part has none."""
        try:
            values, lengths = self._model.run(type(parts[0]).joined(parts))
        except ValueError as error:
            if len(parts) == 1:
                return [str(error)]
            return [found for part in parts for found in self._run_group([part])]
        everything = PooledValues(values, lengths)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        starts = [0, *ends[:-1]]
        return [everything.part(first, end) for first, end in zip(starts, ends, strict=True)]
