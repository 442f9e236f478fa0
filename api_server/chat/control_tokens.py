"""Keeps control tokens that are spelled out in messages as text, so that no message can end its own turn.

Where a name begins in a text, a sign that no text has is put behind its first character before the chat template sees
it. The rendered template is cut at these signs, and the parts are tokenized one by one. No part has a whole name except
those that the template wrote. Some tokenizers look for names in normalized text; a text in which a name arises that way
is cut behind every character. Knows tokens by their names; knows neither templates nor requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Unicode's noncharacters, which no text for interchange has.
SIGNS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))

# Roles whose texts may name marks of calls and of reasoning, as the template does: their writers know the marks.
_TRUSTED = ("system", "developer", "assistant")

_EVERY = re.compile("(?s:.)")


class ControlTokens:
    """The control tokens of one tokenizer: its special tokens, and others that the chat template itself writes."""

    def __init__(self, backend: Any, template: str) -> None:
        added = list(backend.get_added_tokens_decoder().values())
        special = {token.content for token in added if token.special}
        named = special | {token.content for token in added if token.content in template}
        self._special = _beginnings(special)
        self._all = _beginnings(named)
        self._any = re.compile(_options(named) or "(?!)")
        late = {token.content for token in added if token.normalized and token.content in named}
        self._normalizer = backend.normalizer if late else None
        self._late = re.compile(_options(late) or "(?!)")

    def guarded(self, turns: list[dict[str, Any]], tools: Any) -> tuple[list[dict[str, Any]], Any, str]:
        """Breaks names in messages and tools with a sign; returns both and the sign, "" if there is no name."""
        if not any(self._any.search(text) or self._hides(text) for text in _texts([turns, tools])):
            return turns, tools, ""
        whole = "".join(_texts([turns, tools]))
        sign = next((sign for sign in SIGNS if sign not in whole), SIGNS[0])
        special = self._breaker(self._special, sign)
        every = self._breaker(self._all, sign)
        broken = [_mapped(turn, special if turn.get("role") in _TRUSTED else every) for turn in turns]
        return broken, _mapped(tools, special), sign

    def _breaker(self, beginnings: re.Pattern[str], sign: str) -> Callable[[str], str]:
        """Puts the sign behind the first character of each name; behind every character where a name is hidden."""

        def broken(text: str) -> str:
            pattern = _EVERY if self._hides(text) else beginnings
            return pattern.sub(lambda found: found[0] + sign, text)

        return broken

    def _hides(self, text: str) -> bool:
        """Whether a name arises when the text is normalized."""
        return self._normalizer is not None and self._late.search(self._normalizer.normalize_str(text)) is not None


def parts(text: str, sign: str) -> list[str]:
    """The text, cut where names were broken. A template may have written the sign as JSON does."""
    return text.replace(json.dumps(sign)[1:-1], sign).split(sign) if sign else [text]


def _beginnings(names: set[str]) -> re.Pattern[str]:
    """Matches the first character of each name, also where names overlap."""
    options = _options(names)
    return re.compile(f"(?={options})(?s:.)" if options else "(?!)")


def _options(names: set[str]) -> str:
    """Regex alternatives of the names; a name of one character cannot be broken and is left out."""
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


def _mapped(value: Any, broken: Callable[[str], str]) -> Any:
    """The value with all of its texts broken."""
    if isinstance(value, str):
        return broken(value)
    if isinstance(value, Mapping):
        return {_mapped(key, broken): _mapped(item, broken) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, broken) for item in value]
    return value
