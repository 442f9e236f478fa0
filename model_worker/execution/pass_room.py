"""How many tokens a pass may have on a device that had no memory for one of more."""

from __future__ import annotations

# Steps behind a failure until twice as many tokens are tried. Behind each further failure it takes twice as long.
_PATIENCE = 1000


class PassRoom:
    """No limit, until a pass fails."""

    def __init__(self) -> None:
        self.most: int | None = None
        self._patience = _PATIENCE
        self._left = 0

    def holds(self, tokens: int) -> bool:
        """Whether a pass may have so many tokens."""
        return self.most is None or tokens <= self.most

    def is_tight_for(self, tokens: int) -> bool:
        """Whether the limit has been lowered to so many tokens or fewer: the memory of larger passes is free."""
        return self.most is not None and tokens >= self.most

    def lower(self, tokens: int) -> None:
        """A pass of `tokens` tokens has failed: the next ones have at most half of them."""
        self.most = max(1, tokens // 2)
        self._left = self._patience
        self._patience *= 2

    def ended(self) -> None:
        """A step has been computed. After many of them the limit rises: what had the memory may be gone."""
        if self.most is None:
            return
        self._left -= 1
        if self._left <= 0:
            self.most *= 2
            self._left = self._patience
