"""Rules on single tokens as a draw's kernels take them: an entry for each token that they name, sent when a row joins.

The kernels find from the logits where rules leave nothing, and give way there, as `token_rules.py` does. Knows tokens
and records of rows; knows no logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model_worker.cuda.draw_record import ALLOWED, BAD, LIMITED, RESTRICTED, STOPS
from model_worker.sampling.draw_records import RecordTable
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
            restricts = (RESTRICTED if state.restricts else 0) | (LIMITED if state.allowed is not None else 0)
            self._records.rule(row, _entries(state, self._vocab_size), restricts, state.may_stop_at)


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
