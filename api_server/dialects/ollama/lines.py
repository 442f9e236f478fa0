"""Streams of lines of JSON, as Ollama's clients read them."""

from __future__ import annotations

from typing import Any

import orjson

MEDIA_TYPE = "application/x-ndjson"


def line(value: Any) -> bytes:
    """One line: the value as JSON, and the end of the line."""
    return orjson.dumps(value) + b"\n"
