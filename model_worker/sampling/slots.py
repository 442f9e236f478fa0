"""Processors of vLLM's form, which keep the state of a batch: they hear which requests come and go, by slots.

A request keeps its slot until it leaves, so none is ever moved. Requests without a token in a step have slots, too:
their logits are zeros, and what a processor makes of them is dropped. Knows the calling form; knows neither steps nor
where a processor comes from.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interfaces import SamplingParams


@dataclass(slots=True)
class SlotParams:
    """A request's values, under the names that vLLM has for them; `extra_args` are the processor's parameters."""

    extra_args: dict[str, Any]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int

    @classmethod
    def of(cls, params: SamplingParams, parameters: dict[str, Any]) -> SlotParams:
        return cls(
            parameters,
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_p,
            params.seed,
            params.max_new_tokens,
            params.min_new_tokens,
        )


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """What has changed since the last call: slots that were left, and (slot, parameters, prompt, output) of new ones.

    A new one may take the slot of one that has left. Then the slot is among the added only: processors may go through
    the added first, as vLLM's own do. The output is the list that grows.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SlotParams, list[int], list[int]]]
    moved: Sequence[tuple[int, int, Any]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Slotted:
    """What a processor of this form hears of one request."""

    params: SlotParams
    prompt: list[int]
    output: list[int]


@dataclass(slots=True)
class Slots:
    """The requests of one processor, by their rows."""

    processor: Any
    _held: dict[int, tuple[Slotted, int]] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _size: int = 0

    def apply(self, logits: torch.Tensor, rows: Sequence[int], everyone: Mapping[int, Slotted]) -> torch.Tensor:
        """Return the changed logits of the `rows`, which are among `everyone`: all rows that name the processor."""
        self.processor.update_state(self._update(everyone))
        slots = [self._held[row][1] for row in rows]
        batch = logits.new_zeros(self._size, logits.shape[1])
        batch[slots] = logits
        changed = self.processor.apply(batch)
        if not isinstance(changed, torch.Tensor) or changed.shape != batch.shape:
            raise ValueError("a processor must return logits of the shape that it was given")
        return changed[slots]

    def _update(self, everyone: Mapping[int, Slotted]) -> BatchUpdate | None:
        """Give slots to new requests, and free those of requests that have gone; None if there are neither."""
        freed = []
        for row, (request, slot) in list(self._held.items()):
            if everyone.get(row) is not request:
                del self._held[row]
                heapq.heappush(self._free, slot)
                freed.append(slot)
        added = []
        refilled = set()
        for row, request in everyone.items():
            if row in self._held:
                continue
            if self._free:
                slot = heapq.heappop(self._free)
            else:
                slot = self._size
                self._size += 1
            self._held[row] = request, slot
            refilled.add(slot)
            added.append((slot, request.params, request.prompt, request.output))
        removed = [slot for slot in freed if slot not in refilled]
        return BatchUpdate(self._size, removed, added) if removed or added else None
