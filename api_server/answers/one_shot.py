"""The facts of one one-shot request, for metrics and the access log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class OneShot:
    """A request whose texts take one forward pass. Times are `time.monotonic()`'s."""

    path: str
    received: float
    texts: int
    tokens: int
    submitted: float = field(default_factory=time.monotonic)
    # When its values were there; None until then.
    ended: float | None = None
