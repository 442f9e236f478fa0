"""The input of one packed forward pass: the tokens of many sequences, end to end, and the places of their KV.

Knows the layout of a batch in columns. Does not know requests, rows, models, or which tokens are prefill and which
decode: a decode row is a sequence with one query token, a prefill chunk is one with more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_worker.device_copy import upload_together

IntColumn = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """S sequences, T query tokens, L rows of logits. The query tokens of a sequence are its last ones."""

    tokens: Tensor  # i64[T]
    positions: Tensor  # i64[T], or i64[3, T] where images have positions in three directions
    query_start: Tensor  # i32[S+1]: sequence s owns tokens query_start[s] to query_start[s+1]
    kv_len: Tensor  # i32[S]: tokens in the cache once this step's are written
    block_tables: Tensor  # i32[S, max_blocks]: entries past a sequence's last block are never read
    slots: Tensor  # i64[T]: block * block_size + offset, where each token's K and V are written
    logit_positions: Tensor  # i64[L]: indices into the T tokens
    block_size: int
    # Bounds known on the host, so that no backend must wait for a device to learn them.
    max_query: int
    max_kv: int
    # Indices into the T tokens, and the vectors f32[K, (1 + levels) x hidden] that stand for those tokens' embeddings
    # and, level by level, for what is added behind the first layers.
    embeddings: tuple[Tensor, Tensor] | None = None
    # The host's copy of `logit_positions`.
    wanted: IntColumn | None = None
    # i32[2, T]: the first and the last key that each token sees beside those up to its own, by index in the sequence.
    seen: Tensor | None = None
    # i32[S], on the host: the handle of each sequence's adapter, 0 for the base model. None: all have the base model.
    adapters: IntColumn | None = None
    # i32[S], on the host: the worker's row of each sequence; None: they have none.
    rows: IntColumn | None = None
    # i32[S], on the host: tokens of each sequence in this pass, and before it.
    query_lens: IntColumn | None = None
    starts: IntColumn | None = None
    # i64[T]: the row whose last token stands for a token, -1 where it is known; None: all are known.
    owners: Tensor | None = None
    # i64[rows]: those last tokens.
    last_tokens: Tensor | None = None
    # What the caller has sent along for the draw behind the pass.
    drawing: tuple[Tensor, ...] = ()
    # i64[S], on the device: rows of recurrent states, where a pass with one token a sequence is recorded.
    recorded_rows: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.kv_len.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def state_rows(self) -> NDArray[np.int64]:
        """i64[S]: the row of each sequence's recurrent state. Sequences without rows have the first ones."""
        return np.arange(self.num_sequences) if self.rows is None else self.rows.astype(np.int64)

    @cached_property
    def slot_block(self) -> Tensor:
        return self.slots // self.block_size

    @cached_property
    def slot_offset(self) -> Tensor:
        return self.slots % self.block_size

    @cached_property
    def kv_start(self) -> Tensor:
        """i32[S+1]: the first key of each sequence, counted as if they lay one after the other."""
        return nn.functional.pad(self.kv_len.cumsum(0, dtype=torch.int32), (1, 0))

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one token, and the logits of all are wanted, in order."""
        if self.max_query > 1 or self.wanted is None:
            return False
        return np.array_equal(self.wanted, np.arange(self.num_tokens))

    def resolved(self) -> ForwardBatch:
        """Return the batch with all tokens known."""
        if self.owners is None or self.last_tokens is None:
            return self
        tokens = torch.where(self.owners < 0, self.tokens, self.last_tokens[self.owners.clamp(min=0)])
        return replace(self, tokens=tokens, owners=None)

    @classmethod
    def build(
        cls,
        tokens: IntColumn,
        query_lens: IntColumn,
        kv_lens: IntColumn,
        block_tables: IntColumn,
        block_size: int,
        logit_positions: IntColumn,
        device: torch.device | str = "cpu",
        embeddings: tuple[IntColumn, NDArray[np.float32]] | None = None,
        angles: IntColumn | None = None,
        seen: IntColumn | None = None,
        adapters: IntColumn | None = None,
        rows: IntColumn | None = None,
        owners: IntColumn | None = None,
        last_tokens: Tensor | None = None,
        drawing: Sequence[NDArray[Any]] = (),
    ) -> ForwardBatch:
        """Derive positions and slots from the lengths. `kv_lens` count this step's tokens too. `angles` are the
        positions where they do not follow from the lengths. All that a plain step has goes to the device in one copy,
        and the arrays `drawing` go along.
        """
        starts, max_query, max_kv = _checked(tokens, query_lens, kv_lens, block_tables, block_size)
        if max_query == 1:  # as in most steps
            query_start = np.arange(len(tokens) + 1, dtype=np.int32)
            sequence, positions = np.arange(len(tokens)), starts.astype(np.int64)
        else:
            query_start = np.zeros(len(query_lens) + 1, np.int32)
            query_lens.cumsum(out=query_start[1:])
            sequence = np.repeat(np.arange(len(query_lens)), query_lens)
            positions = (starts - query_start[:-1]).astype(np.int64)[sequence] + np.arange(len(tokens))
        index, offset = np.divmod(positions, block_size)
        slots = block_tables[sequence, index].astype(np.int64) * block_size + offset
        three = angles is not None and angles.ndim == 2
        shown = positions if angles is None or three else angles
        device = torch.device(device)
        columns = [
            *_as((tokens, shown, slots, logit_positions), np.int64),
            *_as((query_start, kv_lens, block_tables), np.int32),
            *_as([] if owners is None else [owners], np.int64),
            *drawing,
        ]
        there = upload_together(columns, device)
        *wide, start, lens, tables = there[:7]
        return cls(
            tokens=wide[0],
            positions=torch.from_numpy(angles).to(device) if three else wide[1],
            query_start=start,
            kv_len=lens,
            block_tables=tables,
            slots=wide[2],
            logit_positions=wide[3],
            block_size=block_size,
            max_query=max_query,
            max_kv=max_kv,
            embeddings=None
            if embeddings is None
            else (torch.from_numpy(embeddings[0]).to(device), torch.tensor(embeddings[1], device=device)),
            wanted=logit_positions,
            seen=None if seen is None else torch.from_numpy(seen).to(device),
            adapters=adapters,
            rows=rows,
            query_lens=query_lens,
            starts=starts,
            owners=None if owners is None else there[7],
            last_tokens=last_tokens,
            drawing=tuple(there[len(there) - len(drawing) :]),
        )


def _as(columns: Sequence[IntColumn], dtype: type[np.integer[Any]]) -> list[NDArray[Any]]:
    return [np.ascontiguousarray(column, dtype) for column in columns]


def _checked(
    tokens: IntColumn, query_lens: IntColumn, kv_lens: IntColumn, block_tables: IntColumn, block_size: int
) -> tuple[IntColumn, int, int]:
    """Check the columns. A wrong one would write one sequence's KV over another's, so it must not reach a kernel.

    Returns the keys of each sequence before its query tokens, the most query tokens of one, and the most keys.
    """
    if len(tokens) == 0 or len(query_lens) == 0:
        raise ValueError("an empty batch has nothing to run: leave the step out instead")
    if not len(query_lens) == len(kv_lens) == len(block_tables):
        raise ValueError(
            f"columns disagree on the number of sequences: {len(query_lens)} query_lens, {len(kv_lens)} kv_lens, "
            f"{len(block_tables)} block_tables"
        )
    starts, max_query, max_kv = kv_lens - query_lens, int(query_lens.max()), int(kv_lens.max())
    if query_lens.min() < 1 or starts.min() < 0:
        raise ValueError("each sequence needs at least one query token, and kv_lens must count its query tokens too")
    total = len(query_lens) if max_query == 1 else query_lens.sum()
    if total != len(tokens):
        raise ValueError(f"query_lens add up to {total}, but there are {len(tokens)} tokens")
    if max_kv > block_tables.shape[1] * block_size:
        raise ValueError(
            f"kv_lens reach {max_kv}, but block_tables hold {block_tables.shape[1]} blocks of {block_size} tokens"
        )
    return starts, max_query, max_kv


class DeferredTokens(NamedTuple):
    """Tokens that a pass leaves to later ones, which may be launched before they have been read."""

    unread: NDArray[np.int64]  # [T]: the row whose last token stands for this one; -1: it is known
    rows: NDArray[np.int64]  # [L]: the row whose last token this pass draws; -1: none
    last_tokens: NDArray[np.int64]  # [rows]
