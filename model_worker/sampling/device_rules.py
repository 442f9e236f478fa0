"""Rules on single tokens as a draw's kernels take them: an entry for each token that they name, sent when a row joins.

What `token_rules.py` finds from logits, that nothing but the end or forbidden tokens would be left, follows here from
the tokens that rules and the row's grammar name, so the host knows it before the draw. One case differs: where the
model itself gives -inf to all tokens that are left, rules give way there, and the row is bad here. Knows tokens and
records of rows; knows no logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model_worker.cuda.draw_record import ALLOWED, BAD, LIMITED, STOPS, WHILE_FREE, WHILE_HELD
from model_worker.sampling.draw_records import RecordTable, RowMasks
from model_worker.sampling.row_values import inside_vocabulary
from model_worker.sampling.token_rules import RuleStage, TokenRules

_NONE = np.empty(0, np.int64)


class DeviceRuleStage(RuleStage):
    """The rows with rules on single tokens."""

    def __init__(self, max_rows: int, vocab_size: int, records: RecordTable) -> None:
        """The rows' rules are in their `records`, too."""
        super().__init__(max_rows, vocab_size)
        self._records = records

    def hold(self, row: int, state: TokenRules | None) -> None:
        super().hold(row, state)
        if state is not None:
            restricts = LIMITED if state.allowed is not None else 0
            for held, bit in ((False, WHILE_FREE), (True, WHILE_HELD)):
                restricts |= bit if state.restricts and self._leave_some(state, held) else 0
            ends = len(np.unique(state.stops)) < self._vocab_size
            self._records.rule(row, _entries(state, self._vocab_size), restricts, state.may_stop_at if ends else 0)

    def with_masks(
        self, records: NDArray[np.void], rows: NDArray[np.int32], positions: NDArray[np.int64], masks: RowMasks
    ) -> None:
        """Take from the records of a step the rules that are not in force where a grammar leaves some tokens only."""
        if not self._states:
            return
        for place, words in zip(masks.places.tolist(), masks.words, strict=True):
            if self._held[rows[place]]:
                rules, possible = self._states[int(rows[place])], self._tokens_of(words)
                if not _without(possible, rules.stops).any():
                    # It leaves nothing but the end.
                    records["may_stop_at"][place] = 0
                held = bool(positions[place] < records["may_stop_at"][place])
                if rules.restricts and not self._leave_some(rules, held, possible):
                    records["restricts"][place] &= ~(WHILE_HELD if held else WHILE_FREE)

    def _leave_some(self, rules: TokenRules, held: bool, possible: NDArray[np.bool_] | None = None) -> bool:
        """Whether rules leave a token: of all, or of those that a grammar leaves. `held`: the row may not end yet."""
        bad = np.concatenate([_bad(rules, self._vocab_size), rules.stops if held else _NONE])
        if rules.allowed is not None:
            left = rules.allowed[~np.isin(rules.allowed, bad)]
            return bool(len(left)) if possible is None else bool(possible[left].any())
        if possible is None:
            return len(np.unique(bad)) < self._vocab_size
        return bool(_without(possible, bad).any())

    def _tokens_of(self, words: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which tokens a bitmask leaves; those behind its end are left, too."""
        bits = np.ones(self._vocab_size, np.bool_)
        found = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size]
        bits[: len(found)] = found
        return bits


def _without(possible: NDArray[np.bool_], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    left = possible.copy()
    left[tokens] = False
    return left


def _bad(rules: TokenRules, vocab_size: int) -> NDArray[np.int64]:
    return _NONE if rules.bad_words is None else inside_vocabulary(rules.bad_words.single, vocab_size)


def _entries(rules: TokenRules, vocab_size: int) -> NDArray[np.int64]:
    """Return an entry for each token: a bias in the upper half, and below it the token with its bits."""
    bad, allowed = _bad(rules, vocab_size), _NONE if rules.allowed is None else rules.allowed
    tokens = np.unique(np.concatenate([rules.biased, rules.stops, bad, allowed]))
    biases = np.zeros(len(tokens), np.float32)
    biases[np.searchsorted(tokens, rules.biased)] = rules.biases
    words: NDArray[np.int64] = biases.view(np.int32).astype(np.int64) << 32
    words |= tokens
    for named, bit in ((rules.stops, STOPS), (bad, BAD), (allowed, ALLOWED)):
        words[np.isin(tokens, named)] |= bit
    return words
