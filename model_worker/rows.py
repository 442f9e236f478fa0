"""The worker's row table: the running sequences, updated in place by steps and gathered into each forward pass.

A row holds its block table, its tokens, and how many of them are computed and known: a prompt is known before it is
computed, and so are jump-forward tokens. Knows tokens and blocks. Does not know requests, text or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from interfaces import Join, Step


class StepError(ValueError):
    """A step that does not fit the rows, because of a defect of its sender."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of a row's prompt whose log-probabilities a step reports.

    `tokens[i]`, at index `first + i` of the sequence, is predicted by the step's packed token `offset + i`.
    """

    row: int
    first: int
    offset: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HiddenPart:
    """`count` tokens of a row whose hidden states a step reports.

    They begin at index `first` of the sequence, which is the step's packed token `offset`.
    """

    row: int
    first: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Columns of one forward, rows in the step's order.

    `tokens` i32[T] of all rows one after the other; `ntok`, `kv_len` i32[S] (K/V length after the step);
    `block_tables` i32[S, B]; `sampling` i32[L]: indices into the step's rows that sample; `positions` i64[L]: index
    the new token will have in its sequence; `prompts`: parts of prompts to report; `hidden`: tokens whose hidden
    states are reported; `embeddings`: packed tokens i64[K] with the vectors f32[K, (1 + levels) x hidden] that stand
    for theirs, and are added by the first layers. `angles` i64[T] or i64[3, T]: positions of the tokens, where they are
    not their indices; `seen` i32[2, T]: first and last index of keys that each token sees beside those up to its own.
    """

    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    ntok: NDArray[np.int32]
    kv_len: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    sampling: NDArray[np.int64]
    positions: NDArray[np.int64]
    prompts: list[PromptPart]
    hidden: list[HiddenPart]
    embeddings: tuple[NDArray[np.int64], NDArray[np.float32]] | None
    angles: NDArray[np.int64] | None = None
    seen: NDArray[np.int32] | None = None
    # i32[S]: the handle of each row's adapter, 0 for the base model. None: all have the base model.
    adapters: NDArray[np.int32] | None = None

    @property
    def plain(self) -> bool:
        """Whether tokens are all that goes in and comes out: no reported prompts, hidden states or embeddings."""
        return not self.prompts and not self.hidden and self.embeddings is None

    @property
    def sampling_rows(self) -> NDArray[np.int32]:
        """i32[L]: the rows that sample."""
        return self.rows if len(self.sampling) == len(self.rows) else self.rows[self.sampling]

    @property
    def last_of_sampling(self) -> NDArray[np.int64]:
        """i64[L]: the packed tokens that the new ones follow."""
        if len(self.tokens) == len(self.rows):
            return self.sampling
        return self.ntok.cumsum(dtype=np.int64)[self.sampling] - 1


class Images(Protocol):
    """The images of all rows."""

    def fill(self, packed: PackedStep) -> PackedStep:
        """Return the step with what its rows' images bring: vectors, positions, and keys to see."""
        ...


class WorkerRows:
    """`max_rows` rows of sequences up to `max_model_len` tokens."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, num_blocks: int) -> None:
        self.images: Images | None = None
        self.max_rows = max_rows
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.computed = np.zeros(max_rows, np.int32)
        self.known = np.zeros(max_rows, np.int32)
        # Tokens of the row that the host has read; of the known ones, the last may be on the device only.
        self._read = np.zeros(max_rows, np.int32)
        # Steps launched so far, and how many there were when the row's sequence came: those are not its own.
        self._launched = 0
        self._since = np.zeros(max_rows, np.int64)
        self.block_tables = np.zeros((max_rows, -(-max_model_len // block_size)), np.int32)
        # The tokens that the host has read. There is room for one more than can be computed: the last sampled one.
        # Memory that is never written to takes no space.
        self._tokens = np.zeros((max_rows, self.block_tables.shape[1] * block_size + 1), np.int32)
        # Handles of the rows' adapters; 0: the base model.
        self._adapters = np.zeros(max_rows, np.int32)
        # Rows whose prompt is to be reported: first position, and the prompt's length.
        self._reported: dict[int, tuple[int, int]] = {}
        # Rows whose hidden states are reported, and the first position of each.
        self._hidden: dict[int, int] = {}
        # Rows with vectors for their first tokens, until these are computed.
        self._embeddings: dict[int, NDArray[np.float32]] = {}

    def apply(self, step: Step) -> None:
        """Apply the step's drops, joins and new blocks. Raises StepError."""
        for row in step.drop.tolist():
            self._forget_prompt(row)
            self._hidden.pop(row, None)
        for join in step.joins:
            self._join(join)
        if len(step.new_blocks):
            rows, index, blocks = step.new_blocks.T
            if blocks.min() < 0 or blocks.max() >= self.num_blocks:
                raise StepError(f"step {step.step} names a block outside 0..{self.num_blocks - 1}")
            self._check_rows(rows)
            if index.min() < 0 or index.max() >= self.block_tables.shape[1]:
                raise StepError(f"step {step.step} names a block index outside the table")
            self.block_tables[rows, index] = blocks

    def pack(self, step: Step) -> PackedStep:
        """Gather the columns of the step's forward. Raises StepError when a row lacks tokens that the step computes."""
        rows = step.rows
        self._check_rows(rows)
        computed, known = self.computed.take(rows), self.known.take(rows)
        ntok = np.ones(len(rows), np.int32) if step.ntok is None else step.ntok
        kv_len = computed + ntok
        most = int((kv_len if step.ahead is None else kv_len + step.ahead).max())
        if most > self.block_tables.shape[1] * self.block_size:
            raise StepError(f"step {step.step} computes more tokens than a row can have")
        beyond = known - kv_len
        if ntok.min() < 1 or beyond.min() < 0:
            raise StepError(f"step {step.step} computes tokens that a row does not have")
        sampling = (beyond == 0).nonzero()[0]
        blocks = -(-most // self.block_size)
        adapters = self._adapters.take(rows)
        packed = PackedStep(
            rows=rows,
            tokens=self._next_tokens(rows, computed, ntok),
            ntok=ntok,
            kv_len=kv_len,
            block_tables=self.block_tables[rows, :blocks],
            sampling=sampling,
            positions=kv_len.take(sampling).astype(np.int64),
            prompts=self._prompt_parts(rows, ntok) if self._reported else [],
            hidden=self._hidden_parts(rows, ntok) if self._hidden else [],
            embeddings=self._given_embeddings(rows, ntok) if self._embeddings else None,
            adapters=adapters if adapters.any() else None,
        )
        return packed if self.images is None else self.images.fill(packed)

    def commit(self, packed: PackedStep, tokens: NDArray[np.int32]) -> None:
        """Update the rows from a forward and the tokens it sampled for `packed.sampling`."""
        self.read(packed, tokens, self.launch(packed))

    def launch(self, packed: PackedStep) -> int:
        """Update the rows for a forward whose tokens are not known yet: `read` brings them.

        Returns the launch's number.
        """
        self.computed[packed.rows] = packed.kv_len
        rows = packed.sampling_rows
        self.known[rows] += 1
        for row in rows.tolist() if self._reported or self._embeddings else ():
            self._forget_prompt(row)
        self._launched += 1
        return self._launched

    def read(self, packed: PackedStep, tokens: NDArray[np.int32], launch: int) -> None:
        """Take the tokens of a launch. Rows that have gone to another sequence since then stay as they are."""
        rows, positions = packed.sampling_rows, packed.positions
        own = self.own(rows, launch)
        if not own.all():
            rows, positions, tokens = rows[own], positions[own], tokens[own]
        self._tokens[rows, positions] = tokens
        self._read[rows] = positions + 1

    def own(self, rows: NDArray[np.int32], launch: int) -> NDArray[np.bool_]:
        """Return which rows still have the sequence that they had at a launch."""
        return self._since.take(rows) < launch

    def accept(self, row: int, tokens: NDArray[np.int32]) -> None:
        """Append guesses that were right to a row that was just sampled; all but the last of them are computed."""
        self.follow(row, tokens)
        self.computed[row] += len(tokens)

    def text(self, row: int) -> NDArray[np.int32]:
        """Return the tokens of a row's sequence, as far as the host has read them."""
        return self._tokens[row, : self._read[row]]

    def owners(self, packed: PackedStep) -> NDArray[np.int64] | None:
        """Return i64[T]: the row whose last token a packed one is, where only the device has it, and else -1; None:
        the host has all."""
        rows = packed.rows
        unread = self._read.take(rows) < self.known.take(rows)
        if not unread.any():
            return None
        if len(packed.tokens) == len(rows):
            return np.where(unread, rows, -1).astype(np.int64)
        owners = np.full(len(packed.tokens), -1, np.int64)
        owners[packed.ntok.cumsum()[unread] - 1] = rows[unread]
        return owners

    def follow(self, row: int, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Append tokens that need no sampling to a row that was just sampled."""
        first = int(self.known[row])
        self._tokens[row, first : first + len(tokens)] = tokens
        self.known[row] += len(tokens)
        self._read[row] = self.known[row]

    def clear(self) -> None:
        """Forget all rows, because another scheduler has come."""
        self._reported.clear()
        self._hidden.clear()
        self._embeddings.clear()
        self.known[:] = 0
        self.computed[:] = 0
        self._read[:] = 0

    def _join(self, join: Join) -> None:
        self._check_rows(np.array([join.row]))
        if not 0 <= join.start < len(join.tokens) or not 0 < join.prompt_len <= len(join.tokens):
            raise StepError(f"row {join.row} joins with {len(join.tokens)} tokens from {join.start}")
        if len(join.tokens) > self._tokens.shape[1]:
            raise StepError(f"row {join.row} joins with {len(join.tokens)} tokens, more than a row can have")
        self.computed[join.row] = join.start
        self.known[join.row] = len(join.tokens)
        self._tokens[join.row, : len(join.tokens)] = join.tokens
        self._read[join.row] = len(join.tokens)
        self._since[join.row] = self._launched
        self._adapters[join.row] = join.adapter
        if join.report_from is not None:
            self._reported[join.row] = join.report_from, join.prompt_len
        if join.hidden_from is not None:
            self._hidden[join.row] = join.hidden_from
        if join.embeddings is not None:
            self._embeddings[join.row] = join.embeddings

    def _forget_prompt(self, row: int) -> None:
        self._reported.pop(row, None)
        self._embeddings.pop(row, None)

    def _prompt_parts(self, rows: NDArray[np.int32], ntok: NDArray[np.int32]) -> list[PromptPart]:
        """Return the parts of prompts that the step reports: computing token j predicts token j + 1."""
        parts = []
        for row, start, count, end in zip(rows.tolist(), self.computed[rows], ntok, np.cumsum(ntok), strict=True):
            report_from, prompt_len = self._reported.get(row, (0, 0))
            first = max(int(start) + 1, report_from)
            stop = min(int(start + count) + 1, prompt_len)
            if first < stop:
                offset = int(end - count) + first - 1 - int(start)
                parts.append(PromptPart(row, first, offset, self._tokens[row, first:stop].copy()))
        return parts

    def _hidden_parts(self, rows: NDArray[np.int32], ntok: NDArray[np.int32]) -> list[HiddenPart]:
        parts = []
        for row, start, count, end in zip(rows.tolist(), self.computed[rows], ntok, np.cumsum(ntok), strict=True):
            wanted_from = self._hidden.get(row)
            if wanted_from is not None and wanted_from < start + count:
                first = max(int(start), wanted_from)
                left = int(start + count) - first
                parts.append(HiddenPart(row, first, int(end) - left, left))
        return parts

    def _given_embeddings(
        self, rows: NDArray[np.int32], ntok: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        places = []
        vectors = []
        for row, start, count, end in zip(rows.tolist(), self.computed[rows], ntok, np.cumsum(ntok), strict=True):
            given = self._embeddings.get(row)
            if given is not None and start < len(given):
                part = given[start : start + count]
                places.append(int(end - count) + np.arange(len(part)))
                vectors.append(part)
        return (np.concatenate(places), np.concatenate(vectors)) if places else None

    def _next_tokens(
        self, rows: NDArray[np.int32], first: NDArray[np.int32], ntok: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        if ntok.max() == 1:
            return self._tokens[rows, first]
        parts = zip(rows.tolist(), first.tolist(), (first + ntok).tolist(), strict=True)
        return np.concatenate([self._tokens[row, start:stop] for row, start, stop in parts])

    def _check_rows(self, rows: NDArray[np.int32]) -> None:
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self.known)):
            raise StepError(f"a row is outside 0..{len(self.known) - 1}")
