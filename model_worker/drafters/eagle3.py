"""The drafter that asks an EAGLE-3 head (`eagle3_head.py`).

Entry i of a row's K and V is made of the features of token i and of token i + 1. The features of the last tokens are
kept from the passes of the served model, and the head computes entries when it is asked: a batch in which guesses do
not pay costs it nothing. What is older than the kept features is left out of its attention. Its blocks have the
worker's block ids, so it finds the entries of prompts that were in the prefix cache; the last entry of a block was
made with the token that came next there, which may be another here. All of this decides how good its guesses are, and
nothing else: they are verified. Knows rows. Does not know budgets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from interfaces import Join
from model_worker.batch import ForwardBatch
from model_worker.drafters.base import Proposal
from model_worker.drafters.draft_model import CAUGHT_UP_AT_ONCE, LEAST_REACH
from model_worker.drafters.draw import draw_guesses
from model_worker.drafters.eagle3_head import Eagle3Head
from model_worker.kv_cache import KVCache
from model_worker.rows import WorkerRows
from model_worker.sampling.sampler import SamplerRows

# Tokens of a row whose features are kept: they take as much memory as K and V of some layers.
KEPT_FEATURES = 512
# Most tokens whose features are freed together.
_TOGETHER = 64


def bytes_of_features(head: Eagle3Head, rows: int) -> int:
    """Return the most bytes that the kept features of so many rows take."""
    width = len(head.form.layers) * head.form.target_hidden
    return rows * (KEPT_FEATURES + _TOGETHER) * width * head.dtype.itemsize


@dataclass(slots=True)
class _Row:
    """A row's entries `base` to `done` are computed; features are kept of its tokens from `done` on.

    `base` is the first of a block.
    """

    block_size: int
    base: int = 0
    done: int = 0
    # The first token of each part, and features [n, width].
    kept: deque[tuple[int, Tensor]] = field(default_factory=deque)
    # Digests of all tokens up to the end of each whole block.
    digests: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The index behind the last token whose features are kept."""
        return self.kept[-1][0] + len(self.kept[-1][1]) if self.kept else self.done

    def add(self, first: int, features: Tensor) -> None:
        """Keep the features of the tokens from index `first` on.

        Those that are kept of them were of wrong guesses, or of an earlier sequence whose last pass ended late.
        """
        self._cut_end(first)
        if first > self.end or first < self.base:
            self._begin(first)
        known = max(0, self.done - first)
        known = max(known, len(features) - KEPT_FEATURES)
        if first + known > self.end:
            self._begin(first + known)
            known = self.done - first
        for start in range(known, len(features), _TOGETHER):
            self.kept.append((first + start, features[start : start + _TOGETHER].clone()))
        if self.end - self.done > KEPT_FEATURES:
            self._begin(self.end - KEPT_FEATURES)

    def take(self, count: int) -> Tensor:
        """Return the features of the next tokens, whose entries are computed now."""
        parts = []
        missing = count
        while missing:
            first, features = self.kept.popleft()
            parts.append(features[:missing])
            if missing < len(features):
                self.kept.appendleft((first + missing, features[missing:]))
            missing -= len(parts[-1])
        self.done += count
        return torch.cat(parts)

    def _begin(self, first: int) -> None:
        """Leave out the entries of all tokens before index `first`, and up to the end of a block."""
        self.base = -(-first // self.block_size) * self.block_size
        self.done = self.base
        while self.kept and self.kept[0][0] + len(self.kept[0][1]) <= self.base:
            self.kept.popleft()
        if self.kept and self.kept[0][0] < self.base:
            first, features = self.kept.popleft()
            self.kept.appendleft((self.base, features[self.base - first :]))

    def _cut_end(self, end: int) -> None:
        while self.kept and self.kept[-1][0] >= end:
            self.kept.pop()
        if self.kept and self.end > end:
            first, features = self.kept.pop()
            # A view would hold the memory of all that wrong guesses left here.
            self.kept.append((first, features[: end - first].clone()))


class Eagle3:
    """Guesses by a head. `observe` must be given the residuals of `head.form.layers` of all steps."""

    name = "eagle3"

    def __init__(
        self,
        head: Eagle3Head,
        cache: KVCache,
        rows: WorkerRows,
        sampler: SamplerRows,
        ends: Callable[[], tuple[nn.Module, nn.Module]],
        most: int = 4,
    ) -> None:
        """`cache` is the head's own. `rows`, `sampler` and `ends` (as of `Backend.ends`) are the worker's.

        It guesses up to `most` tokens of a row.
        """
        self.most = most
        self._head = head
        self._cache = cache
        self._rows = rows
        self._sampler = sampler
        self._ends = ends
        self._known: dict[int, _Row] = {}
        # By block: a digest of all tokens up to its end, as the head has entries of them.
        self._digests: dict[int, int] = {}
        self._salts: dict[int, str] = {}

    def joined(self, join: Join) -> None:
        known = _Row(self._rows.block_size)
        self._known[join.row] = known
        self._salts[join.row] = join.salt
        blocks = -(-join.start // known.block_size)
        self._digest(join.row, join.tokens, min(blocks, len(join.tokens) // known.block_size))
        found = blocks
        while 0 < found <= len(known.digests) and self._has(join.row, found - 1):
            found -= 1
        known.base = found * known.block_size
        known.done = max(join.start, known.base)

    def left(self, row: int, answer: NDArray[np.int32]) -> None:
        self._known.pop(row, None)
        self._salts.pop(row, None)

    def rest(self) -> None:
        """Nothing is put off."""

    def warm_up(self) -> None:
        """Guess once after two tokens with random features, before there are rows. It compiles kernels, too."""
        form = self._head.form
        features = torch.randn(2, len(form.layers) * form.target_hidden, dtype=self._head.dtype)
        batch = ForwardBatch.build(
            tokens=np.zeros(2, np.int32),
            query_lens=np.array([2]),
            kv_lens=np.array([2]),
            block_tables=np.zeros((1, 2), np.int32),
            block_size=self._rows.block_size,
            logit_positions=np.array([1]),
        )
        embedding, lm_head = self._ends()
        with torch.inference_mode():
            embeddings = self._head.embeddings_of(batch.tokens, embedding)
            states = self._head.states_of(features)
            out = self._head(embeddings, states, batch.positions, batch, self._cache)
            self._head.guesses_of(out[1:], lm_head)

    def observe(self, batch: ForwardBatch, residuals: NDArray[np.float32]) -> None:
        """Keep the features of a batch that was computed."""
        assert batch.rows is not None
        features = torch.from_numpy(residuals).flatten(1).to(self._head.dtype)
        starts = batch.query_start.tolist()
        for i, (row, end) in enumerate(zip(batch.rows.tolist(), batch.kv_len.tolist(), strict=True)):
            known = self._known.get(row)
            if known is not None:
                part = features[starts[i] : starts[i + 1]]
                known.add(end - len(part), part)

    def propose(self, texts: Mapping[int, NDArray[np.int32]], most: Mapping[int, int]) -> dict[int, Proposal]:
        with torch.inference_mode():
            return self._propose(texts, most)

    def _propose(self, texts: Mapping[int, NDArray[np.int32]], most: Mapping[int, int]) -> dict[int, Proposal]:
        counts = self._due(texts)
        if not counts:
            return {}
        firsts = {row: self._known[row].done for row in counts}
        features = torch.cat([self._known[row].take(count) for row, count in counts.items()])
        tokens = {row: texts[row][firsts[row] + 1 : firsts[row] + 1 + count] for row, count in counts.items()}
        out = self._compute(tokens, firsts, self._head.states_of(features))
        for row, count in counts.items():
            self._note(row, texts[row], firsts[row], count)
        ready = [i for i, row in enumerate(counts) if self._known[row].done == len(texts[row]) - 1]
        rows = [list(counts)[i] for i in ready]
        ends = np.cumsum(list(counts.values())) - 1
        out = out[torch.from_numpy(ends[ready])]
        guesses: dict[int, list[int]] = {row: [] for row in rows}
        own: dict[int, list[float]] = {row: [] for row in rows}
        while rows:
            logits, states = self._head.guesses_of(out, self._ends()[1])
            positions = [len(texts[row]) + len(guesses[row]) for row in rows]
            drawn, shares = draw_guesses(self._sampler, logits, rows, positions)
            for row, token, share in zip(rows, drawn, shares, strict=True):
                guesses[row].append(token)
                own[row].append(share)
            going = [
                i
                for i, row in enumerate(rows)
                if len(guesses[row]) < min(self.most, most[row]) and float(np.prod(own[row])) > LEAST_REACH
            ]
            rows = [rows[i] for i in going]
            if rows:
                last = {row: np.array(guesses[row][-1:], np.int32) for row in rows}
                places = {row: len(texts[row]) - 2 + len(guesses[row]) for row in rows}
                out = self._compute(last, places, states[going])
        return {row: Proposal(np.array(found, np.int32), np.array(own[row])) for row, found in guesses.items() if found}

    def _due(self, texts: Mapping[int, NDArray[np.int32]]) -> dict[int, int]:
        """Return how many entries of each row to compute."""
        counts = {}
        left = CAUGHT_UP_AT_ONCE
        for row, text in texts.items():
            known = self._known.get(row)
            if known is not None:
                count = min(known.end, len(text) - 1) - known.done
                if count > 0 and left > 0:
                    counts[row] = min(count, left)
                    left -= counts[row]
        return counts

    def _compute(self, tokens: Mapping[int, NDArray[np.int32]], firsts: Mapping[int, int], states: Tensor) -> Tensor:
        """Compute entries of rows from index `firsts` on. Their tokens come after those that the states are of."""
        size = self._rows.block_size
        bases = np.array([self._known[row].base for row in tokens])
        lengths = np.array([len(part) for part in tokens.values()])
        ends = np.array([firsts[row] for row in tokens]) + lengths
        blocks = -(-ends // size)
        tables = np.zeros((len(tokens), int((blocks - bases // size).max())), np.int32)
        for i, row in enumerate(tokens):
            table = self._rows.block_tables[row, bases[i] // size : blocks[i]]
            tables[i, : len(table)] = table
            for block in table[(firsts[row] - bases[i]) // size :].tolist():
                self._digests.pop(block, None)
        batch = ForwardBatch.build(
            tokens=np.concatenate([*tokens.values()]),
            query_lens=lengths,
            kv_lens=ends - bases,
            block_tables=tables,
            block_size=size,
            logit_positions=np.cumsum(lengths) - 1,
        )
        positions = batch.positions + torch.from_numpy(np.repeat(bases, lengths))
        embeddings = self._head.embeddings_of(batch.tokens, self._ends()[0])
        out: Tensor = self._head(embeddings, states, positions, batch, self._cache)
        return out

    def _note(self, row: int, text: NDArray[np.int32], first: int, count: int) -> None:
        """Note of which tokens the blocks have entries that were completed now."""
        known = self._known[row]
        size = known.block_size
        whole = (first + count) // size
        self._digest(row, text, whole)
        for index in range(first // size, whole):
            self._digests[int(self._rows.block_tables[row, index])] = known.digests[index]

    def _digest(self, row: int, text: NDArray[np.int32], blocks: int) -> None:
        """Make the digests of a row's first blocks, whole ones."""
        known = self._known[row]
        size = known.block_size
        for index in range(len(known.digests), blocks):
            before = known.digests[-1] if index else hash(self._salts[row])
            known.digests.append(hash((before, text[index * size : (index + 1) * size].astype(np.int32).tobytes())))

    def _has(self, row: int, index: int) -> bool:
        """Whether the head has the entries of a row's block."""
        known = self._known[row]
        return self._digests.get(int(self._rows.block_tables[row, index])) == known.digests[index]
