"""How many tokens a pass may have on a device that had no memory for one of more."""

from __future__ import annotations

# Steps after which twice as many tokens are tried. Where a try has failed, the next one takes twice as many steps.
_PATIENCE = 1000
_LONGEST_PATIENCE = 16_000
# Passes that the prompts of one step may take: the rows in decode wait for all of them.
_PASSES = 8


class PassRoom:
    """No limit, until a pass fails."""

    def __init__(self) -> None:
        self.most: int | None = None
        self._patience = _PATIENCE
        self._left = 0
        # Whether the limit has risen since a pass failed, and whether a pass has needed what it rose by.
        self._risen = False
        self._used = False

    @property
    def step_tokens(self) -> int | None:
        """The most tokens of a step that takes few passes; None for no limit."""
        return None if self.most is None else _PASSES * self.most

    def holds(self, tokens: int) -> bool:
        """Whether a pass may have so many tokens."""
        return self.most is None or tokens <= self.most

    def lower(self, tokens: int) -> None:
        """A pass of `tokens` tokens has failed: the next ones have at most half of them."""
        if self.most is not None and tokens // 2 >= self.most:
            return  # it could not be cut, and says nothing of shorter ones
        if self._risen:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        self.most = max(1, tokens // 2)
        self._left = self._patience
        self._risen = self._used = False

    def passed(self, tokens: int) -> None:
        """A pass of `tokens` tokens was computed."""
        if self.most is not None and 2 * tokens > self.most:
            self._used = True

    def ended(self) -> None:
        """A step has ended. After many of them the limit rises: what had the memory may be gone.

        A limit that has risen rises again when a pass was computed that the one before did not allow.
        """
        if self.most is None:
            return
        self._left = max(0, self._left - 1)
        if self._left or (self._risen and not self._used):
            return
        if self._risen:
            self._patience = _PATIENCE
        self.most *= 2
        self._left = self._patience
        self._risen, self._used = True, False
