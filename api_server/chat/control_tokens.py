"""Keeps control tokens that are spelled out in messages as text, so that no message can end its own turn.

Where a name begins in a text, a sign that no text has is put behind its first character before the chat template sees
it. The rendered template is cut at these signs, and the parts are tokenized one by one. No part has a whole name except
those that the template wrote. Knows tokens by their names; knows neither templates nor requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Unicode's noncharacters, which no text for interchange has.
SIGNS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))

# Roles whose texts may name marks of calls and of reasoning, as the template does: their writers know the marks.
_TRUSTED = ("system", "developer", "assistant")


class ControlTokens:
    """The control tokens of one tokenizer: its special tokens, and others that the chat template itself writes."""

    def __init__(self, backend: Any, template: str) -> None:
        added = backend.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        named = special | {token.content for token in added if token.content in template}
        self._special = _beginnings(special)
        self._all = _beginnings(named)
        self._any = re.compile(_options(named) or "(?!)")

    def guarded(self, turns: list[dict[str, Any]], tools: Any) -> tuple[list[dict[str, Any]], Any, str]:
        """Breaks names in messages and tools with a sign; returns both and the sign, "" if there is no name."""
        if not any(self._any.search(text) for text in _texts([turns, tools])):
            return turns, tools, ""
        whole = "".join(_texts([turns, tools]))
        sign = next((sign for sign in SIGNS if sign not in whole), SIGNS[0])
        broken = [_mapped(turn, self._special if turn.get("role") in _TRUSTED else self._all, sign) for turn in turns]
        return broken, _mapped(tools, self._special, sign), sign


def parts(text: str, sign: str) -> list[str]:
    """The text, cut where names were broken. A template may have written the sign as JSON does."""
    return text.replace(json.dumps(sign)[1:-1], sign).split(sign) if sign else [text]


def _beginnings(names: set[str]) -> re.Pattern[str]:
    """Matches the first character of each name, also where names overlap."""
    options = _options(names)
    return re.compile(f"(?={options})(?s:.)" if options else "(?!)")


def _options(names: set[str]) -> str:
    """Regex alternatives of a name; a name of one character cannot be broken and has none."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if len(name) > 1)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, beginnings: re.Pattern[str], sign: str) -> Any:
    if isinstance(value, str):
        return beginnings.sub(lambda found: found[0] + sign, value)
    if isinstance(value, Mapping):
        return {_mapped(key, beginnings, sign): _mapped(item, beginnings, sign) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, beginnings, sign) for item in value]
    return value
