"""How long a pass takes by the number of its tokens, learnt from passes that served.

What one more token costs differs by processor, cores, weights and batch, and grows in steps, as kernels multiply a few
tokens at a time. Knows times and counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Most tokens of a pass whose time is learnt: beyond, nothing is guessed.
MOST_TOKENS = 256
# What a further token is believed to cost until it was tried, as a share of a pass of one.
BELIEVED_SHARE = 0.2
# Weight of a new time among those before it.
_WEIGHT = 0.15
# Times that count by the least of them, as the first ones may hold something else.
_FIRST_TIMES = 3
# A time beyond this multiple of the known one counts as that multiple: another process had the machine.
_OUTLIER = 2.0
# Seconds between two steps from which on the worker waited for work.
_IDLE_SECONDS = 0.005


class PassTimes:
    """Times are of one clock, in seconds.

    The time of an overlapped pass is that between its end and the end of the one before. A step that waits for its
    tokens has a pass, and some more time for each token that it draws.
    """

    def __init__(self) -> None:
        self._seconds = np.full(MOST_TOKENS + 1, np.nan)
        self._times = np.zeros(MOST_TOKENS + 1, np.int64)
        # Steps until now, and the step in which a number of tokens was measured last.
        self._steps = 0
        self._measured = np.zeros(MOST_TOKENS + 1, np.int64)
        self._draw = 0.0
        self._ended = 0.0
        self._shape = 1 + BELIEVED_SHARE * (np.arange(MOST_TOKENS + 1) - 1)
        self._shape[0] = 1

    @property
    def draw_seconds(self) -> float:
        """Seconds that a drawn token takes beside the pass, where the step waits for it."""
        return self._draw

    def knows(self, tokens: int, within: int) -> bool:
        """Whether a pass of so many tokens was measured in one of the last `within` steps."""
        return bool(self._times[tokens]) and self._steps - int(self._measured[tokens]) < within

    def overlapped(self, tokens: int, launched: float, ended: float) -> None:
        """A pass of one token for each row, whose tokens were not waited for, has ended."""
        begun = self._begun(launched)
        self._ended = ended
        self.computed(tokens, ended - begun)

    def waited(self, drawn: int, launched: float, computed: float, ended: float) -> None:
        """A step has ended that waited for its pass, which took `computed` seconds, and drew so many tokens."""
        begun = self._begun(launched)
        self._ended = ended
        if drawn:
            rest = max(0.0, ended - begun - computed) / drawn
            self._draw = rest if not self._draw else self._draw + _WEIGHT * (min(rest, 4 * self._draw) - self._draw)

    def leave_out(self, seconds: float) -> None:
        """So many seconds since the last step belong to no step: a drafter's model took them."""
        self._ended += seconds

    def computed(self, tokens: int, seconds: float) -> None:
        """A pass of `tokens` tokens took so long."""
        self._steps += 1
        if not 0 < tokens <= MOST_TOKENS or seconds <= 0:
            return
        known = self._seconds[tokens]
        if self._times[tokens] < _FIRST_TIMES:
            self._seconds[tokens] = np.fmin(known, seconds)
        else:
            self._seconds[tokens] = known + _WEIGHT * (min(seconds, _OUTLIER * known) - known)
        self._times[tokens] += 1
        self._measured[tokens] = self._steps

    def seconds(self, least: int, most: int) -> NDArray[np.float64] | None:
        """Return the times of passes of `least` to `most` tokens; None while none is known.

        Numbers of tokens that were not measured lie between their neighbours, as the believed share has it.
        """
        known = np.flatnonzero(self._times)
        if not len(known):
            return None
        wanted = np.arange(least, most + 1)
        ratios = np.interp(wanted, known, self._seconds[known] / self._shape[known])
        # A pass takes no less time for more tokens; single times vary.
        grown: NDArray[np.float64] = np.maximum.accumulate(ratios * self._shape[wanted])
        return grown

    def _begun(self, launched: float) -> float:
        return self._ended if launched - self._ended < _IDLE_SECONDS else launched
