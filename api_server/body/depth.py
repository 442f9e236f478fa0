"""How deep lists and objects in a body may be nested."""

from __future__ import annotations

from typing import Any

# Most levels of a body: code that writes parts of it again goes no deeper than 254.
DEEPEST = 200


def too_deep(value: Any, text: bytes | bytearray) -> bool:
    """True when lists and objects in a value are nested deeper than DEEPEST; `text` is what it was read from."""
    return text.count(b"[") + text.count(b"{") > DEEPEST and _deeper(value, DEEPEST)


def _deeper(value: Any, levels: int) -> bool:
    """True when lists and objects are nested deeper than `levels`."""
    layer = [value]
    for _ in range(levels):
        inner = (part.values() if isinstance(part, dict) else part for part in layer)
        layer = [item for part in inner for item in part if isinstance(item, dict | list)]
        if not layer:
            return False
    return True
