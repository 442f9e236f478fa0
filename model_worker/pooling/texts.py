"""The texts of one forward pass as tensors: all tokens one text after another, without padding.

Knows how texts are cut into passes. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from interfaces import PoolingContext, TokenMark

# A text stands in a group of texts that are padded to one length if this share of the group's tokens is no padding.
_LEAST_FULL = 0.8


@dataclass(frozen=True)
class Texts:
    """`tokens` i64[T] and `types` i64[T] of `lengths` texts.

    `counted` bool[T] are the tokens that pooling counts, and `kept` bool[T] those whose vectors are kept; None for all.
    `seen` are the tokens of each text that its tokens see, the first ones; None for all.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    types: Tensor | None = None
    counted: Tensor | None = None
    kept: Tensor | None = None
    seen: tuple[int, ...] | None = None

    @classmethod
    def take(cls, context: PoolingContext, places: NDArray[np.int64], device: torch.device) -> Texts:
        """Take the texts at `places` of a context, in that order."""
        offsets = context.offsets
        index = np.concatenate([np.arange(offsets[place], offsets[place + 1]) for place in places])
        tokens = torch.from_numpy(context.tokens[index].astype(np.int64)).to(device)
        lengths = tuple(context.lengths[places].tolist())
        if context.token_types is None:
            return cls(tokens, lengths)
        types = context.token_types[index].astype(np.int64)
        counted, seen, kept = (types != mark for mark in (TokenMark.UNCOUNTED, TokenMark.UNSEEN, TokenMark.SKIPPED))
        starts = np.cumsum(lengths) - lengths
        return cls(
            tokens,
            lengths,
            torch.from_numpy(types.clip(0)).to(device),
            None if counted.all() else torch.from_numpy(counted).to(device),
            None if kept.all() else torch.from_numpy(kept).to(device),
            None if seen.all() else tuple(np.add.reduceat(seen, starts, dtype=np.int64).tolist()),
        )

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The place of each text's first token, and the number of all tokens."""
        return (0, *np.cumsum(self.lengths).tolist())

    @cached_property
    def positions(self) -> Tensor:
        """The place of each token within its text: i64[T]."""
        found = np.concatenate([np.arange(length) for length in self.lengths])
        return torch.from_numpy(found).to(self.device)

    @cached_property
    def bounds(self) -> Tensor:
        """`starts` on the device: i32[texts + 1]."""
        return torch.tensor(self.starts, dtype=torch.int32, device=self.device)

    @cached_property
    def counts(self) -> Tensor:
        """`lengths` on the device: i64[texts]."""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.device)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Neighbours of one length: place of the first token, number of texts, and their length."""
        found: list[tuple[int, int, int]] = []
        for start, length in zip(self.starts, self.lengths, strict=False):
            if found and found[-1][2] == length:
                first, count, _ = found[-1]
                found[-1] = (first, count + 1, length)
            else:
                found.append((start, 1, length))
        return tuple(found)

    def part(self, first: int, end: int) -> Texts:
        """Return the texts from `first` up to and without `end`."""
        inside = slice(self.starts[first], self.starts[end])
        types = None if self.types is None else self.types[inside]
        counted = None if self.counted is None else self.counted[inside]
        kept = None if self.kept is None else self.kept[inside]
        seen = None if self.seen is None else self.seen[first:end]
        return Texts(self.tokens[inside], self.lengths[first:end], types, counted, kept, seen)

    def groups(self) -> Iterator[Texts]:
        """Cut into neighbours of like length, for models that need padding."""
        first = 0
        longest = total = 0
        for i, length in enumerate(self.lengths):
            longest = max(longest, length)
            total += length
            if total < _LEAST_FULL * longest * (i + 1 - first):
                yield self.part(first, i)
                first = i
                longest = length
                total = length
        yield self.part(first, len(self.lengths))

    @cached_property
    def visible(self) -> Tensor:
        """Which places of a padded layout hold a token that others see: bool[texts, longest text]."""
        if self.seen is None:
            return self.mask
        places = torch.arange(max(self.lengths), device=self.device)
        return places[None] < torch.tensor(self.seen, device=self.device)[:, None]

    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """Lay values [T, ...] out as [texts, longest text, ...]."""
        if len(self.lengths) == 1:
            return values[None]
        longest = max(self.lengths)
        padded = values.new_full((len(self.lengths), longest, *values.shape[1:]), fill)
        padded[self.mask] = values
        return padded

    @cached_property
    def mask(self) -> Tensor:
        """Which places of a padded layout hold a token: bool[texts, longest text]."""
        places = torch.arange(max(self.lengths), device=self.device)
        return places[None] < self.counts[:, None]


def passes(lengths: NDArray[np.int32], budget: int) -> Iterator[NDArray[np.int64]]:
    """Cut texts into forward passes of at most `budget` tokens, the longest first.

    A text that is longer than the budget has a pass to itself.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    first = total = 0
    for i, length in enumerate(lengths[order].tolist()):
        if total + length > budget and i > first:
            yield order[first:i]
            first = i
            total = 0
        total += length
    yield order[first:]
