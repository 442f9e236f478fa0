"""Reads JSON that others wrote: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. ValueError for one that is none, or is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None


def read_json_file(path: Path) -> Any:
    """Return the value of a JSON file. ValueError for one that is none, OSError for one that cannot be read."""
    return parse_json(path.read_text(encoding="utf-8"))
