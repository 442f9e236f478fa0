"""Who may follow whom as the worker of an index, and who was given up.

A supervisor counts the starts of its worker, so of its epochs the later one follows the earlier. Two supervisors (one
that was started anew on another machine, say) count from numbers that say nothing about each other.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from interfaces.messages import EPOCHS_OF_A_SUPERVISOR

MAX_SUPERVISORS = 64
"""Of one index that are remembered."""


def same_supervisor(epoch: int, other: int) -> bool:
    return epoch // EPOCHS_OF_A_SUPERVISOR == other // EPOCHS_OF_A_SUPERVISOR


class FencedEpochs:
    """By index: of each supervisor the latest epoch that was given up."""

    def __init__(self) -> None:
        self._latest: defaultdict[int, OrderedDict[int, int]] = defaultdict(OrderedDict)

    def add(self, index: int, epoch: int) -> None:
        latest, supervisor = self._latest[index], epoch // EPOCHS_OF_A_SUPERVISOR
        latest[supervisor] = max(epoch, latest.pop(supervisor, epoch))
        if len(latest) > MAX_SUPERVISORS:
            latest.popitem(last=False)

    def has(self, index: int, epoch: int) -> bool:
        return epoch <= self._latest[index].get(epoch // EPOCHS_OF_A_SUPERVISOR, -1)
