"""What all ranks of a group do, or none of them: each says whether it could, before they go on to compute together.

A rank that has failed and goes another way would meet a sum of the others with one of another kind. Knows no device:
the answers go through the hosts, since a device may wait for a sum that never comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

# Says whether something is so on all ranks. All of them ask it, in one order.
Agreed = Callable[[bool], bool]
Result = TypeVar("Result")


class NotEverywhere(RuntimeError):
    """Another rank could not do what this one has done."""


def together(agreed: Agreed | None, attempt: Callable[[], Result]) -> Result:
    """Return what `attempt` gives, once it has worked on all ranks; without any others, at once.

    Raises its RuntimeError here, and NotEverywhere for one on another rank. It raises others, which end this rank.
    """
    if agreed is None:
        return attempt()
    try:
        result = attempt()
    except RuntimeError:
        agreed(False)
        raise
    if not agreed(True):
        raise NotEverywhere("it fails on another rank, whose log says why")
    return result
