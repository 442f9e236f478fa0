"""Which worker may follow another at an index, and which epochs are fenced.

A supervisor counts the starts of its worker: a later epoch follows an earlier one. The numbers of two supervisors say
nothing about each other, for example after one was started anew on another machine.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from interfaces import EPOCHS_OF_A_SUPERVISOR

# Supervisors remembered for each index.
MAX_SUPERVISORS = 64


def same_supervisor(epoch: int, other: int) -> bool:
    """Whether two epochs were counted by the same supervisor."""
    return epoch // EPOCHS_OF_A_SUPERVISOR == other // EPOCHS_OF_A_SUPERVISOR


class FencedEpochs:
    """The latest epoch of each supervisor that was given up, by index. All earlier ones are fenced, too."""

    def __init__(self) -> None:
        self._latest: defaultdict[int, OrderedDict[int, int]] = defaultdict(OrderedDict)

    def add(self, index: int, epoch: int) -> None:
        latest = self._latest[index]
        supervisor = epoch // EPOCHS_OF_A_SUPERVISOR
        latest[supervisor] = max(epoch, latest.pop(supervisor, epoch))
        if len(latest) > MAX_SUPERVISORS:
            latest.popitem(last=False)

    def has(self, index: int, epoch: int) -> bool:
        return epoch <= self._latest[index].get(epoch // EPOCHS_OF_A_SUPERVISOR, -1)
