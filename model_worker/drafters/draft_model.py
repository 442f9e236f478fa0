"""The drafter that asks a smaller model of the same vocabulary.

It has a KV cache of its own with the worker's block ids, so the scheduler's blocks are its blocks, too. It draws with
the row's own noise: two distributions that are alike then mostly draw the same token. What it has computed of a row may
be behind, or wrong where guesses were: it catches up when it is asked. Knows rows, and a backend; knows no budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import Join
from model_worker.backends.base import Backend
from model_worker.batch import ForwardBatch
from model_worker.drafters.base import Proposal
from model_worker.drafters.draw import draw_guesses
from model_worker.rows import WorkerRows
from model_worker.sampling.sampler import SamplerRows

# Tokens that it catches up in a step. The guesses of a row wait until all of its text is computed.
CAUGHT_UP_AT_ONCE = 256
# A row gets no further guess when it is less likely to come as far.
LEAST_REACH = 0.2


@dataclass(slots=True)
class _Row:
    """The tokens of a row that are computed, and a digest of all tokens up to the end of each whole block."""

    tokens: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    asked: bool = False

    @property
    def computed(self) -> int:
        return len(self.tokens)


class DraftModel:
    """Guesses by a model that runs on `backend`."""

    name = "model"

    def __init__(self, backend: Backend, rows: WorkerRows, sampler: SamplerRows, most: int = 4) -> None:
        """`rows` and `sampler` are the worker's. It guesses up to `most` tokens of a row."""
        self.most = most
        self._backend = backend
        self._rows = rows
        self._sampler = sampler
        self._known: dict[int, _Row] = {}
        # By block: a digest of all tokens up to its end, as the draft model has computed them.
        self._digests: dict[int, int] = {}

    def joined(self, join: Join) -> None:
        self._known[join.row] = _Row()

    def left(self, row: int, answer: NDArray[np.int32]) -> None:
        self._known.pop(row, None)

    def rest(self) -> None:
        """Nothing is put off."""

    def propose(self, texts: Mapping[int, NDArray[np.int32]], most: Mapping[int, int]) -> dict[int, Proposal]:
        left = CAUGHT_UP_AT_ONCE
        parts: dict[int, NDArray[np.int32]] = {}
        for row, text in texts.items():
            self._find_common(row, text)
            part = text[self._known[row].computed :][: max(left, 0)]
            if len(part):
                parts[row] = part
                left -= len(part)
        if not parts:
            return {}
        logits = self._compute(parts)
        ready = [i for i, row in enumerate(parts) if self._known[row].computed == len(texts[row])]
        rows = [list(parts)[i] for i in ready]
        logits = logits[torch.tensor(ready, dtype=torch.int64)]
        guesses: dict[int, list[int]] = {row: [] for row in rows}
        own: dict[int, list[float]] = {row: [] for row in rows}
        while rows:
            positions = [len(texts[row]) + len(guesses[row]) for row in rows]
            tokens, shares = draw_guesses(self._sampler, logits, rows, positions)
            for row, token, share in zip(rows, tokens, shares, strict=True):
                guesses[row].append(token)
                own[row].append(share)
            rows = [
                row
                for row in rows
                if len(guesses[row]) < min(self.most, most[row]) and float(np.prod(own[row])) > LEAST_REACH
            ]
            if rows:
                logits = self._compute({row: np.array(guesses[row][-1:], np.int32) for row in rows})
        return {row: Proposal(np.array(found, np.int32), np.array(own[row])) for row, found in guesses.items() if found}

    def _find_common(self, row: int, text: NDArray[np.int32]) -> None:
        """Find how much of a row's text is computed, and its last token is not."""
        known = self._known.setdefault(row, _Row())
        size = self._rows.block_size
        same = min(known.computed, len(text) - 1)
        wrong = np.flatnonzero(np.array(known.tokens[:same], np.int32) != text[:same])
        same = int(wrong[0]) if len(wrong) else same
        del known.tokens[same:]
        del known.digests[same // size :]
        if not known.asked:
            known.asked = True
            while len(known.digests) < (len(text) - 1) // size:
                index = len(known.digests)
                digest = self._digest(known.digests, text[index * size : (index + 1) * size])
                if self._digests.get(int(self._rows.block_tables[row, index])) != digest:
                    break
                known.digests.append(digest)
                known.tokens += text[index * size : (index + 1) * size].tolist()

    def _digest(self, before: list[int], block: NDArray[np.int32]) -> int:
        return hash((before[-1] if before else 0, block.astype(np.int32).tobytes()))

    def _compute(self, parts: Mapping[int, NDArray[np.int32]]) -> torch.Tensor:
        """Compute the next tokens of rows. Returns the logits of each row's last one."""
        rows = np.array(list(parts), np.int32)
        lengths = np.array([len(part) for part in parts.values()], np.int32)
        ends = np.array([self._known[row].computed for row in parts], np.int32) + lengths
        blocks = -(-int(ends.max()) // self._rows.block_size)
        batch = ForwardBatch.build(
            tokens=np.concatenate([*parts.values()]),
            query_lens=lengths,
            kv_lens=ends,
            block_tables=self._rows.block_tables[rows, :blocks],
            block_size=self._rows.block_size,
            logit_positions=np.cumsum(lengths) - 1,
            device=self._backend.device,
        )
        logits = self._backend.logits(batch)
        for row, part in parts.items():
            self._keep(row, part)
        return logits

    def _keep(self, row: int, part: NDArray[np.int32]) -> None:
        """Note that the next tokens of a row are computed."""
        known = self._known[row]
        size = self._rows.block_size
        table = self._rows.block_tables[row]
        begun = known.computed // size
        known.tokens += part.tolist()
        for index in range(begun, -(-known.computed // size)):
            self._digests.pop(int(table[index]), None)
        for index in range(begun, known.computed // size):
            block = np.array(known.tokens[index * size : (index + 1) * size], np.int32)
            known.digests.append(self._digest(known.digests, block))
            self._digests[int(table[index])] = known.digests[-1]
