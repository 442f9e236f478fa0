"""How long it takes to copy a block of K and V, by what was measured, and whether that is less than to compute it.

The time is an average over the blocks that were copied. The weight of earlier blocks halves every `HALF_LIFE`.
Neither they nor one copy weigh more than `MOST_BLOCKS`. Where copies do not pay, the scheduler makes none, and so
measures none. The average is doubted more as it gets older: a copy that takes twice as long as computing is tried
again after `HALF_LIFE`, and one that takes four times as long after two of them. No copy is tried so while another
one is under way. The number of questions makes no difference. A copy that fails counts as a slow one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds after which earlier blocks count half, and in which the doubt in a time that is not measured doubles.
HALF_LIFE = 30.0
# All earlier blocks count for as many at most.
MOST_BLOCKS = 16
# A copy that failed counts as one that took so many times as long as computing, or as copies before.
FAILED_TIMES = 4.0


class CopyTime:
    """The time of one way to copy blocks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._average: float | None = None
        # So many blocks the average stands for, and when it was measured last.
        self._blocks = 0.0
        self._measured = 0.0

    @property
    def block_seconds(self) -> float | None:
        """The measured time of a block; None while nothing is measured."""
        return self._average

    def learn(self, blocks: int, seconds: float) -> None:
        """Learn from a copy of so many blocks. One of none says nothing."""
        if not blocks:
            return
        before = min(self._blocks, MOST_BLOCKS) * self._faith()
        # One slow copy of many does not outweigh all before it, either.
        new = min(blocks, MOST_BLOCKS)
        self._blocks = before + new
        self._average = (before * (self._average or 0.0) + new * seconds / blocks) / self._blocks
        self._measured = self._clock()

    def failed(self, blocks: int, computing: float | None) -> None:
        """Learn that so many blocks did not come; one of them is computed in `computing` seconds."""
        usual = max(self._average or 0.0, computing or 0.0)
        if usual:
            self.learn(blocks, blocks * FAILED_TIMES * usual)

    def pays(self, blocks: int, ahead: int, computing: float | None) -> bool:
        """Whether copying `blocks` after `ahead` others takes less time than to compute them, as far as is known.

        One block is computed in `computing` seconds.
        """
        if self._average is None or computing is None:
            return True
        # One copy is enough to measure anew.
        faith = 1.0 if ahead else self._faith()
        return faith * self._average * (ahead + blocks) < blocks * computing

    def _faith(self) -> float:
        """1 when the average was measured just now, and half of that after each `HALF_LIFE`."""
        return float(0.5 ** ((self._clock() - self._measured) / HALF_LIFE))
