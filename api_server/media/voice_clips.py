"""Clips of voices to imitate: files that become samples, and the codes that a codec has made of the last ones.

Knows limits; knows no codec.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from api_server.media.client import MediaClient
from api_server.media.clips import Clips
from interfaces import Segments
from shared.recogniser_files import MelForm

# Most bytes and seconds of a clip.
MOST_BYTES = 16 << 20
MOST_SECONDS = 30.0
# Clips whose codes are kept. A clip has some thousand codes.
_KEPT = 64


class VoiceClips(Clips):
    """The clips of one API process, whose features are samples f32[1, n] at `rate`."""

    def __init__(
        self, rate: int, segments: Segments | None, key: bytes, observe: Callable[[float, float], None]
    ) -> None:
        # Each sample is a frame of its own.
        form = MelForm(bins=1, rate=rate, hop=1, frames=1)
        super().__init__(form, MediaClient({"rate": rate}), segments, key, MOST_BYTES, MOST_SECONDS, observe)
        self._codes: OrderedDict[bytes, list[int]] = OrderedDict()

    def codes(self, digest: bytes) -> list[int] | None:
        """The codes of a file, if they are kept."""
        if digest in self._codes:
            self._codes.move_to_end(digest)
        return self._codes.get(digest)

    def keep(self, digest: bytes, codes: list[int]) -> None:
        self._codes[digest] = codes
        while len(self._codes) > _KEPT:
            self._codes.popitem(last=False)
