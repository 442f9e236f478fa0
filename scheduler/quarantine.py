"""Which sequences were being computed when a worker crashed: one of them may be the reason.

After two crashes a sequence runs isolated, so that a third crash hits no other. If it crashes then, too, it is poison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler.sequence import Sequence

CRASHES_BEFORE_ISOLATION = 2


class Quarantine:
    """Counts the crashes of open sequences."""

    def __init__(self) -> None:
        self._crashes: Counter[int] = Counter()

    def record_crash(self, sequence: Sequence) -> None:
        """Count a crash of a worker that was computing this sequence."""
        self._crashes[sequence.order] += 1

    def crashes(self, sequence: Sequence) -> int:
        return self._crashes[sequence.order]

    def is_poison(self, sequence: Sequence) -> bool:
        return self.crashes(sequence) > CRASHES_BEFORE_ISOLATION

    def is_isolated(self, sequence: Sequence) -> bool:
        return self.crashes(sequence) >= CRASHES_BEFORE_ISOLATION

    def any_isolated(self, sequences: Iterable[Sequence | None]) -> bool:
        """Whether one of these sequences must run isolated."""
        return bool(self._crashes) and any(one is not None and self.is_isolated(one) for one in sequences)

    def forget(self, sequence: Sequence) -> None:
        """Drop the count of a sequence that has ended."""
        self._crashes.pop(sequence.order, None)
