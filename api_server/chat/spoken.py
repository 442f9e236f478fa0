"""The names of answers that were spoken: a name holds the answer's text, so that a conversation can go on from it.

No server keeps the sound, nor what belongs to a name. Knows neither requests nor speech.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from api_server.errors import invalid

_PREFIX = "audio_"


def name_of(transcript: str) -> str:
    """The name of a spoken answer."""
    return _PREFIX + base64.urlsafe_b64encode(transcript.encode()).decode().rstrip("=")


def transcript_of(audio: Any, path: str) -> str:
    """The text of a spoken answer, which a message names. Raises RequestFailed."""
    name = audio.get("id") if isinstance(audio, Mapping) else None
    if isinstance(name, str) and name.startswith(_PREFIX):
        coded = name.removeprefix(_PREFIX)
        try:
            return base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True).decode()
        except (binascii.Error, ValueError):
            pass
    raise invalid(
        f"{path}.id must be the id of an answer that this kind of server has spoken, as it stood in audio.id: send it "
        "whole, or send the text as content",
        f"{path}.id",
    )
