"""Which models hear sound within a conversation, by the types that their config.json may name.

Knows names. The worker knows how such a model encodes a sound, and the media process how its features are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Decoders of text with an encoder of sound, whose vectors stand in place of tokens of the prompt.
LISTENING_TYPES = ("audioflamingo3", "glmasr", "qwen2_audio", "voxtral")


def listens(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model that hears."""
    return config.get("model_type") in LISTENING_TYPES
