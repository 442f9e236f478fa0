"""The facts of one one-shot request, for metrics and the access log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Sound:
    """The sound of a request, as far as it has come."""

    # Its length in seconds.
    seconds: float = 0.0
    # When its first samples were there, on `time.monotonic()`'s clock; None until then.
    first: float | None = None


@dataclass(frozen=True)
class Pictures:
    """The images of a request: their number, and the pixels and denoising steps of each."""

    count: int
    pixels: int
    steps: int


@dataclass
class OneShot:
    """A request whose texts take one forward pass, or whose images are painted. Times are `time.monotonic()`'s."""

    path: str
    received: float
    texts: int
    tokens: int
    # The name of the key that asked, empty without keys; and the name of the model.
    tenant: str = ""
    model: str = ""
    submitted: float = field(default_factory=time.monotonic)
    # When its values were there; None until then.
    ended: float | None = None
    # Speech tokens that were generated so far.
    generated: int = 0
    # None for a request that is not spoken.
    sound: Sound | None = None
    # None for a request without images to paint.
    pictures: Pictures | None = None
