"""What is done with the fields of a body that no model has: known ones that are not built are refused by name.

Knows no dialect: each has its own table. Nothing that would change an answer is ignored in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from api_server.errors import unsupported

log = logging.getLogger("tokenyard")

Refusals = Mapping[str, tuple[str, Collection[Any]]]
"""Names of fields: what each asks for, and the values that ask for nothing."""

_MAX_REPORTED = 100
_reported: set[str] = set()


def check(raw: Mapping[str, Any], refused: Refusals, known: Collection[str]) -> None:
    """Raises RequestFailed(UNSUPPORTED) for the first refused field; logs each unknown name once."""
    for name, value in raw.items():
        if name in refused:
            what, harmless = refused[name]
            if not any(value is ok or (not isinstance(ok, bool) and value == ok) for ok in harmless):
                raise unsupported(name, what)
        elif name not in known:
            _report(name)


def _report(name: str) -> None:
    if name not in _reported and len(_reported) < _MAX_REPORTED:
        _reported.add(name)
        log.warning("the field %.100r of a request is unknown and ignored (reported once)", name)
