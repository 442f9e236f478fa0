"""Recorded steps of rows with adapters: the same buffers as those without, and a column of slots beside them.

Each size is recorded when it is first wanted, and again once adapters change other modules than before. All write their
logits to one place: that of steps with prompts if these are recorded, too, and else one of their own. Temporaries lie
where those of the others do. Knows batches and slots; it does not know adapters.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.cuda.graphs import DecodeGraphs, Recorder
from model_worker.cuda.mixed_graphs import MixedGraphs
from model_worker.device_copy import upload_together

log = logging.getLogger(__name__)

# Logits of a batch whose tokens have these slots, i32[T].
AdaptedForward = Callable[[ForwardBatch, Tensor], Tensor]


class AdaptedGraphs:
    """`forward` recorded for the sizes of steps that had adapters so far."""

    def __init__(
        self, decode: DecodeGraphs, mixed: MixedGraphs | None, forward: AdaptedForward, recorded: Recorder
    ) -> None:
        self._decode = decode
        self._mixed = mixed
        self._forward = forward
        self._recorded = recorded
        self._device = decode.buffers.device
        most = max(decode.buffers.max_rows, 0 if mixed is None else mixed.buffers.max_rows + 1)
        # Of each sequence, and of the one that pads.
        self._slots = torch.full((most,), -1, dtype=torch.int32, device=self._device)
        self._logits = None if mixed is None else mixed.logits
        self._graphs: dict[tuple[bool, int], Callable[[], Tensor]] = {}
        # Sizes that could not be recorded.
        self._failed: set[tuple[bool, int]] = set()
        self._generation = 0

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether `run` can do the batch."""
        return self._decode.holds(batch) or (self._mixed is not None and self._mixed.holds(batch))

    def record(self, batch: ForwardBatch, generation: int) -> bool:
        """Record the size of a batch, if it is not. Returns whether it is now. Recording runs a step, which is all
        padding. A size that cannot be recorded is tried again in another generation."""
        if generation != self._generation:
            self._graphs.clear()
            self._failed.clear()
            self._generation = generation
        source, decodes, size = self._place(batch)
        key = decodes, size
        if key in self._graphs or key in self._failed:
            return key in self._graphs
        try:
            self._record(source, decodes, size)
        except RuntimeError as error:  # torch.OutOfMemoryError, too
            self._failed.add(key)
            step = f"{size} {'rows' if decodes else 'tokens with prompts'}"
            said = "steps of %s with adapters are computed without graphs, which is slow, until adapters change: %s"
            log.warning(said, step, str(error).partition("\n")[0])
            return False
        return True

    def _record(self, source: Any, decodes: bool, size: int) -> None:
        source.buffers.fill_whole(size)
        self._slots.fill_(-1)
        if self._logits is None:
            # No record owns the place of logits.
            first = self._step(source.buffers.batch(size), decodes)
            self._logits = first.new_empty(self._decode.buffers.max_rows, first.shape[1])
        self._graphs[decodes, size] = self._recorded(lambda: self._placed(source.buffers.batch(size), decodes))

    def run(self, batch: ForwardBatch, slots: NDArray[np.int32]) -> Tensor:
        """Return the logits of a batch whose size is recorded, and whose sequences have these slots.

        The next run may overwrite them.
        """
        padded = np.full(len(self._slots), -1, np.int32)
        padded[: len(slots)] = slots
        self._slots.copy_(upload_together([padded], self._device)[0])
        source, decodes, size = self._place(batch)
        source.buffers.fill(batch, size)
        return self._graphs[decodes, size]()[: len(batch.logit_positions)]

    def _place(self, batch: ForwardBatch) -> tuple[Any, bool, int]:
        """Return the graphs whose buffers a batch takes, whether it decodes, and the recorded size for it."""
        decodes = self._decode.holds(batch)
        source: Any = self._decode if decodes else self._mixed
        sizes = source.sizes
        return source, decodes, sizes[bisect_left(sizes, batch.num_tokens)]

    def _placed(self, batch: ForwardBatch, decodes: bool) -> Tensor:
        assert self._logits is not None
        logits = self._step(batch, decodes)
        return self._logits[: len(logits)].copy_(logits)

    def _step(self, batch: ForwardBatch, decodes: bool) -> Tensor:
        tokens = batch.num_tokens
        if decodes:
            return self._forward(batch, self._slots[:tokens])
        # The sequence of each token: how many have ended before it, or with it.
        ends = batch.query_start[1:].contiguous()
        places = torch.arange(tokens, device=self._device, dtype=ends.dtype)
        owners = torch.searchsorted(ends, places, right=True)
        return self._forward(batch, self._slots[owners.clamp(max=len(self._slots) - 1)])
