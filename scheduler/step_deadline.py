"""The time that a worker's step may take, learnt from the steps before it.

Knows seconds and token counts. `health.py` decides what happens when a step is late.
"""

from __future__ import annotations

import math
from collections import deque

# Allowed before anything is learnt: the first steps may compile kernels.
FIRST_STEP_SECONDS = 180.0
# A step is late beyond this multiple of what the slowest recent step would have taken for its tokens.
PATIENCE = 10.0
_RECENT = 64


class StepDeadline:
    """`least` is the number of seconds that any step may take."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)

    def learn(self, tokens: float, seconds: float) -> None:
        self._recent.append((tokens, seconds))

    def allowed(self, tokens: float, usual: float = math.inf) -> float:
        """Seconds for a step of `tokens` tokens. A first one of more than the `usual` number has more of them.

        Beyond the largest recent step the time grows in proportion to the tokens, so that a long prefill after much
        decoding is not late.
        """
        if not self._recent:
            return max(self._least, FIRST_STEP_SECONDS * max(1.0, tokens / usual))
        slowest = max(seconds for _, seconds in self._recent)
        most = max(count for count, _ in self._recent)
        return self._least + PATIENCE * slowest * max(1.0, tokens / (most or 1))
