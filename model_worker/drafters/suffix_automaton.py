"""A suffix automaton: every stretch of the texts that were added, with how often it came, in linear memory.

A state stands for all stretches that end at the same places. A transition makes a stretch longer by a token at its end,
a link shorter by tokens at its beginning. (A. Blumer et al., 1985; of several texts as in M. Mohri et al., 2009.)
Knows tokens only.
"""

from __future__ import annotations

# Links up to which a new token counts. Text that repeats one token has as many links as tokens.
COUNTED_LINKS = 24

ROOT = 0
_NONE = -1


class SuffixAutomaton:
    """Texts are added token by token; `end_text` ends one, so that no stretch reaches into the next."""

    def __init__(self) -> None:
        # Tokens that were added.
        self.size = 0
        self._longest = [0]
        self._links = [_NONE]
        self._counts = [0]
        self._next: list[dict[int, int]] = [{}]
        self._last = ROOT

    def end_text(self) -> None:
        self._last = ROOT

    def add(self, token: int) -> None:
        """Append a token to the text that is being added."""
        self.size += 1
        last = self._last
        known = self._next[last].get(token)
        if known is not None:
            longer = self._longest[known] == self._longest[last] + 1
            state = known if longer else self._split(last, token, known)
        else:
            state = self._append(last, token)
        self._last = state
        links = 0
        while state > ROOT and links < COUNTED_LINKS:
            self._counts[state] += 1
            state = self._links[state]
            links += 1

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state of the longest known end of a stretch, of `length` tokens, made longer by a token.

        And the length of that end. `state` may be from before later tokens were added.
        """
        while state != ROOT and token not in self._next[state]:
            state = self._links[state]
            length = min(length, self._longest[state])
        following = self._next[state].get(token)
        return (ROOT, 0) if following is None else (following, length + 1)

    def likely(self, state: int, most: int) -> tuple[list[int], list[float]]:
        """Return up to `most` tokens that came most often after a state, and after each other, and how often.

        That is a share of the times that the state came: some of them had nothing behind them.
        """
        tokens: list[int] = []
        shares: list[float] = []
        while len(tokens) < most and self._next[state]:
            counts = self._counts
            token, following = max(self._next[state].items(), key=lambda item: counts[item[1]])
            tokens.append(token)
            shares.append(min(1.0, counts[following] / max(1, counts[state])))
            state = following
        return tokens, shares

    def _append(self, last: int, token: int) -> int:
        state = self._new(self._longest[last] + 1, {})
        at = last
        while at != _NONE and token not in self._next[at]:
            self._next[at][token] = state
            at = self._links[at]
        if at == _NONE:
            self._links[state] = ROOT
        else:
            known = self._next[at][token]
            longer = self._longest[known] == self._longest[at] + 1
            self._links[state] = known if longer else self._split(at, token, known)
        return state

    def _split(self, at: int, token: int, known: int) -> int:
        """Give the shorter stretches of a state a state of their own: they have come where the longer ones have not."""
        state = self._new(self._longest[at] + 1, dict(self._next[known]))
        self._links[state] = self._links[known]
        self._counts[state] = self._counts[known]
        self._links[known] = state
        while at != _NONE and self._next[at].get(token) == known:
            self._next[at][token] = state
            at = self._links[at]
        return state

    def _new(self, longest: int, following: dict[int, int]) -> int:
        self._longest.append(longest)
        self._links.append(_NONE)
        self._counts.append(0)
        self._next.append(following)
        return len(self._links) - 1
