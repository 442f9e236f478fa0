"""How long a worker's step may take, learnt from those before it.

Knows times and token counts; who acts when a step is late is decided in `core.py`.
"""

from __future__ import annotations

from collections import deque

FIRST_STEP_SECONDS = 180.0
"""Before anything was learnt: the first steps may compile kernels."""
PATIENCE = 10.0
"""A step is late when it takes so many times what the slowest of the recent ones would have taken for its tokens."""
_RECENT = 64


class StepDeadline:
    """`least` is what a step may take in any case, in seconds."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)

    def learn(self, tokens: int, seconds: float) -> None:
        self._recent.append((tokens, seconds))

    def allowed(self, tokens: int) -> float:
        """Seconds for a step of so many tokens. Time is taken to grow with the tokens beyond the most seen lately, so
        that a long prefill after much decoding is not late."""
        if not self._recent:
            return max(self._least, FIRST_STEP_SECONDS)
        slowest = max(seconds for _, seconds in self._recent)
        most = max(count for count, _ in self._recent)
        return self._least + PATIENCE * slowest * max(1.0, tokens / max(1, most))
