"""The drafter that takes guesses from answers that have ended: requests of one kind often get answers alike.

There is one automaton for each salt, which stands for an adapter and the client's cache_salt: shared across salts, the
time of an answer would tell what others were answered. Memory is bounded: each salt has two automata, an older one
that is searched and a younger one that takes its place when the older one is full, and the salts used last are kept.
(Suffix decoding: G. Oliaro et al., 2024.) Knows tokens only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from interfaces import Join
from model_worker.drafters.base import Proposal
from model_worker.drafters.suffix_automaton import ROOT, SuffixAutomaton

# Tokens of an automaton, at which the younger one takes its place. A token takes about 700 bytes.
FULL = 1 << 15
# Tokens of all automata together.
MOST_TOKENS = 1 << 17
# Salts with answers: that of each client may be another.
MOST_SALTS = 1024
# Tokens of an answer that are added in a step: a tenth of a millisecond.
ADDED_AT_ONCE = 24
# Tokens of answers that wait to be added. Those of further answers are left out.
MOST_WAITING = 1 << 14
# Tokens at the end of a text that are searched for: a match may be longer only when it grows.
SEARCHED = 32
# Tokens at the end that must have come before.
LEAST_MATCH = 2


@dataclass(slots=True)
class _Answers:
    """The answers of one salt."""

    older: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    younger: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    @property
    def size(self) -> int:
        return self.older.size + self.younger.size

    def add(self, token: int) -> None:
        self.older.add(token)
        if self.older.size > FULL // 2:
            self.younger.add(token)

    def end_text(self) -> None:
        self.older.end_text()
        self.younger.end_text()
        if self.older.size > FULL:
            self.older = self.younger
            self.younger = SuffixAutomaton()


@dataclass(slots=True)
class _Row:
    """How far a row's text has been searched for, and the match of its end in `automaton`."""

    salt: str
    automaton: SuffixAutomaton | None = None
    searched: int = 0
    state: int = ROOT
    length: int = 0


class EndedAnswers:
    """Guesses what came most often after the longest match of the text's end in ended answers of its salt."""

    name = "suffix"

    def __init__(self) -> None:
        # By salt, the one used last at the end.
        self._answers: OrderedDict[str, _Answers] = OrderedDict()
        self._rows: dict[int, _Row] = {}
        self._waiting: deque[tuple[str, list[int]]] = deque()
        self._waiting_tokens = 0
        # How many tokens of the first waiting answer were added.
        self._added = 0
        # Tokens in all automata. Salts are too many to be counted after each answer.
        self.size = 0

    def joined(self, join: Join) -> None:
        self._rows[join.row] = _Row(join.salt)

    def left(self, row: int, answer: NDArray[np.int32]) -> None:
        found = self._rows.pop(row, None)
        if found is not None and LEAST_MATCH < len(answer) <= MOST_WAITING - self._waiting_tokens:
            self._waiting.append((found.salt, answer.tolist()))
            self._waiting_tokens += len(answer)

    def rest(self) -> None:
        """Add some tokens of the answers that have ended."""
        if not self._waiting:
            return
        salt, answer = self._waiting[0]
        if salt not in self._answers:
            self._answers[salt] = _Answers()
        self._answers.move_to_end(salt)
        answers = self._answers[salt]
        before = answers.size
        for token in answer[self._added : self._added + ADDED_AT_ONCE]:
            answers.add(token)
        self._added += ADDED_AT_ONCE
        if self._added >= len(answer):
            answers.end_text()
            self._waiting.popleft()
            self._waiting_tokens -= len(answer)
            self._added = 0
        self.size += answers.size - before
        if not self._added:
            self._evict()

    def _evict(self) -> None:
        """Forget the answers of salts that were used long ago."""
        while len(self._answers) > 1 and (self.size > MOST_TOKENS or len(self._answers) > MOST_SALTS):
            _, answers = self._answers.popitem(last=False)
            self.size -= answers.size

    def propose(self, texts: Mapping[int, NDArray[np.int32]], most: Mapping[int, int]) -> dict[int, Proposal]:
        proposals = {}
        for row, text in texts.items():
            found = self._rows.get(row)
            if found is not None and found.salt in self._answers:
                proposal = self._propose(found, text, most[row])
                if proposal is not None:
                    proposals[row] = proposal
        return proposals

    def _propose(self, row: _Row, text: NDArray[np.int32], most: int) -> Proposal | None:
        automaton = self._answers[row.salt].older
        if row.automaton is not automaton or row.searched > len(text) or len(text) - row.searched > SEARCHED:
            row.automaton = automaton
            row.searched = max(0, len(text) - SEARCHED)
            row.state = ROOT
            row.length = 0
        for token in text[row.searched :].tolist():
            row.state, row.length = automaton.follow(row.state, row.length, token)
        row.searched = len(text)
        if row.length < LEAST_MATCH:
            return None
        tokens, shares = automaton.likely(row.state, min(most, row.length))
        if not tokens:
            return None
        return Proposal(np.array(tokens, np.int32), np.array(shares), min(row.length, SEARCHED).bit_length())
