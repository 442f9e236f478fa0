"""Suggests the path of this server that an unknown path meant.

Base URLs get a slash too many, `/v1` twice or not at all, a prefix of a proxy, or a whole endpoint. Such a path is
refused, since a guess that answers today need not answer tomorrow, but the error names the right path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

_MOST_CHARACTERS = 300
# Longer paths are no slips.
_MOST_PARTS = 8


def meant(path: str, exists: Callable[[str], bool]) -> str | None:
    """The longest tail of the path that is a path of this server, perhaps behind /v1."""
    parts = _parts(path)
    tails = ["/" + "/".join(parts[start:]) for start in range(len(parts))]
    candidates = (candidate for tail in tails for candidate in (tail, "/v1" + tail))
    return next((candidate for candidate in candidates if candidate != path and exists(candidate)), None)


def above(path: str) -> Iterator[str]:
    """Yields the paths above this one, nearest first, without the root."""
    parts = _parts(path)
    return ("/" + "/".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))


def _parts(path: str) -> list[str]:
    parts = [part for part in path[:_MOST_CHARACTERS].split("/") if part]
    return parts if len(path) <= _MOST_CHARACTERS and len(parts) <= _MOST_PARTS else []
