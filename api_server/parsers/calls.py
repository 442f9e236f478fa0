"""The calls of one answer: numbers, names and ids for the readers that find them.

Knows the tools that may be called; knows no format.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from interfaces import ParsedToolCallDelta

_NAME = re.compile(r"[\w.:\-]{1,128}")


def random_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Calls:
    """Makes the deltas of calls. `tools` maps names to the schemas of their parameters; empty when they are not known.

    `forced`: the answer is nothing but calls.
    """

    def __init__(
        self, tools: Mapping[str, Any] | None = None, new_id: Callable[[], str] = random_id, forced: bool = False
    ) -> None:
        self.tools = tools or {}
        self.forced = forced
        self._new_id = new_id
        self.begun = 0
        self.completed = 0

    def content(self, text: str) -> ParsedToolCallDelta:
        return ParsedToolCallDelta(self.begun, content=text)

    def begin(self, name: str, call_id: str | None = None) -> ParsedToolCallDelta:
        """Begins the next call."""
        self.begun += 1
        return ParsedToolCallDelta(self.begun - 1, id=call_id or self._new_id(), name=name)

    def arguments(self, text: str) -> ParsedToolCallDelta:
        """Adds to the arguments of the last call."""
        return ParsedToolCallDelta(self.begun - 1, arguments=text)

    def complete(self) -> None:
        """Marks the last call as complete."""
        self.completed = self.begun

    def may_be(self, name: str) -> bool:
        """True when a tool has this name; without known tools, when one could have it."""
        return name in self.tools if self.tools else is_name(name)


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def schema_of(parameters: Any, name: str) -> Mapping[str, Any]:
    """The schema of one parameter, empty where it is unknown."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}
