"""A loaded model of the one-shot tasks, and how the texts of a request go through it.

Knows a backbone and a head. Does not know where either comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import PoolingContext, PoolingTask
from model_worker.pooling.adapters import PoolingAdapters
from model_worker.pooling.backbone import Backbone
from model_worker.pooling.heads import Head, Values
from model_worker.pooling.texts import Texts, passes


@dataclass(frozen=True, eq=False)
class Pooler:
    """A `PoolingModel`. One pass takes at most `max_batch_tokens` tokens, and more only for one text."""

    architecture: str
    device: torch.device
    weights: torch.dtype
    vocab_size: int
    max_model_len: int
    max_batch_tokens: int
    labels: list[str]
    quantization: str
    backbone: Backbone
    head: Head
    # Heads of texts that go through no backbone, by their kind.
    static: Mapping[str, Head] = field(default_factory=dict)
    # None: it takes no adapters.
    adapters: PoolingAdapters | None = None
    # Whether it would be faster with kernels that are not compiled yet.
    waits_for_kernels: bool = False

    @property
    def tasks(self) -> frozenset[PoolingTask]:
        return self.head.tasks

    @property
    def hidden_size(self) -> int:
        return self.head.width

    @property
    def dtype(self) -> str:
        return str(self.weights).removeprefix("torch.")

    @property
    def backend(self) -> str:
        weights = "" if self.quantization == "none" else f", {self.quantization} weights"
        return f"transformers, {self.backbone.description}{weights}"

    @torch.inference_mode()
    def run(self, texts: PoolingContext) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return the values of all texts, f32[rows, width], and the rows of each text. ValueError for texts that the
        model cannot compute; nothing is computed then."""
        self._check(texts)
        rows = np.zeros(len(texts), np.int32)
        pieces: list[NDArray[np.float32]] = []
        order: list[NDArray[np.int64]] = []
        for places in passes(texts.lengths, self.max_batch_tokens):
            packed = Texts.take(texts, places, self.device)
            found = self._found(packed, texts)
            rows[places] = found.rows
            pieces.append(found.values.cpu().numpy())
            order.append(places)
        values = np.concatenate(pieces)
        if not np.isfinite(values).all():
            raise ValueError(f"the values of {self.architecture} in {self.dtype} are not finite: use dtype float32")
        return _in_order(values, rows, np.concatenate(order)), rows

    def _found(self, packed: Texts, texts: PoolingContext) -> Values:
        static = self.static.get(texts.route)
        if static is not None:
            # No adapter has anything for these.
            return static(torch.empty(0), packed, texts)
        if not texts.adapter_handle:
            return self.head(self.backbone(packed), packed, texts)
        if self.adapters is None:
            raise ValueError(f"{self.architecture} takes no adapters: ask for the model itself")
        with self.adapters.rows(texts.adapter_handle):
            return self.head(self.adapters.backbone(packed), packed, texts)

    def _check(self, texts: PoolingContext) -> None:
        if texts.task not in self.tasks:
            known = ", ".join(sorted(self.tasks))
            raise ValueError(f"task {texts.task.value!r} is not what {self.architecture} does: it does {known}")
        longest = int(texts.lengths.max())
        if longest > self.max_model_len:
            place = int(texts.lengths.argmax())
            raise ValueError(
                f"text {place} has {longest} tokens; {self.architecture} takes at most {self.max_model_len}: "
                "truncate it"
            )
        if (largest := int(texts.tokens.max())) >= self.vocab_size:
            raise ValueError(f"token id {largest} is outside of the vocabulary: ids are 0 to {self.vocab_size - 1}")
        if texts.dimensions is not None and texts.dimensions > self.hidden_size:
            raise ValueError(
                f"dimensions must be at most {self.hidden_size}, the width of a vector, got {texts.dimensions}"
            )


def _in_order(values: NDArray[np.float32], rows: NDArray[np.int32], order: NDArray[np.int64]) -> NDArray[np.float32]:
    """Bring values whose texts are in `order` into the order of the texts."""
    if np.all(rows == 1):
        found = np.empty_like(values)
        found[order] = values
        return found
    pieces: Sequence[NDArray[np.float32]] = np.split(values, np.cumsum(rows[order])[:-1])
    by_text = dict(zip(order.tolist(), pieces, strict=True))
    return np.concatenate([by_text[place] for place in range(len(rows))])
