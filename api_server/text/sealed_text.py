"""Texts that a client keeps for this server and returns unchanged, such as the reasoning of an answer.

They are opaque and authentic, not secret: a client that gets one has the text, too, or could ask for it. The key
follows from the model, so that any replica, and the same server tomorrow, reads what one of them has sealed.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from hashlib import blake2b

_MARK = b"ty1"
_TAG_BYTES = 16


class Seal:
    """Seals and opens texts with the key of one model."""

    def __init__(self, model: str) -> None:
        self._key = blake2b(model.encode(), person=b"tokenyard seal").digest()

    def sealed(self, text: str) -> str:
        content = text.encode()
        return base64.urlsafe_b64encode(_MARK + self._tag(content) + content).decode()

    def opened(self, sealed: str) -> str | None:
        """The sealed text, or None if this model's key did not seal it."""
        try:
            packed = base64.b64decode(sealed.encode(), b"-_", validate=True)
            mark = packed[:3]
            tag = packed[3 : 3 + _TAG_BYTES]
            content = packed[3 + _TAG_BYTES :]
            authentic = mark == _MARK and hmac.compare_digest(tag, self._tag(content))
            return content.decode() if authentic else None
        except (ValueError, binascii.Error):
            return None

    def _tag(self, content: bytes) -> bytes:
        return blake2b(content, digest_size=_TAG_BYTES, key=self._key).digest()
