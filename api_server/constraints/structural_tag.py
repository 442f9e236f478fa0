"""Translates structural tags, SGLang's and xgrammar's "free text with constrained parts", to llguidance's Lark.

Both forms are accepted: `{"structures": [{begin, schema, end}], "triggers": [...]}` and `{"format": {"type": ...}}`.
Texts in which special tokens are written out mean those tokens, because a model writes tokens there. Knows no matcher.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from api_server.constraints import ebnf
from api_server.constraints.limits import check_pattern
from shared.grammar import GrammarError

FREE = "FREE_TEXT"
_FREE_LINE = rf"{FREE}: /(?s:.*)/"

# Most levels of nested formats.
MOST_LEVELS = 32

# Returns a JSON schema as the text that stands after `%json`; raises GrammarError.
SchemaText = Callable[[Any], str]


def to_lark(tag: Any, special: Mapping[str, int], schema_text: SchemaText) -> str:
    """Translates a tag. `special` are the special tokens by their text. GrammarError names what is not understood."""
    if not isinstance(tag, dict):
        raise GrammarError("it must be a JSON object")
    writer = _Writer(special, schema_text)
    if "structures" in tag:
        body = writer.format(_of_structures(tag), "structures", 0)
    else:
        body = writer.format(_part(tag, "format", dict, "it"), "format", 0)
    return "\n".join(["%llguidance {}", f"start: {body}", _FREE_LINE, *writer.lines]) + "\n"


def _of_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    tags = []
    for i, given in enumerate(_part(tag, "structures", list, "it")):
        where = f"structures[{i}]"
        if not isinstance(given, dict):
            raise GrammarError(f"{where} must be an object")
        content = {"type": "json_schema", "json_schema": _part(given, "schema", dict, where)}
        begin = _part(given, "begin", str, where)
        end = _part(given, "end", str, where)
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": _part(tag, "triggers", list, "it"), "tags": tags}


class _Writer:
    """Collects the lines of formats; a format itself becomes an expression."""

    def __init__(self, special: Mapping[str, int], schema_text: SchemaText) -> None:
        self._special = special
        self._schema_text = schema_text
        names = sorted(special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, names))) if names else None
        self.lines: list[str] = []

    def format(self, given: Any, where: str, levels: int) -> str:
        if levels > MOST_LEVELS:
            raise GrammarError(f"formats are nested more than {MOST_LEVELS} deep")
        if not isinstance(given, dict):
            raise GrammarError(f"{where} must be an object with a type")
        kind = given.get("type")
        if kind in ("sequence", "or"):
            elements = _part(given, "elements", list, where)
            parts = [self.format(part, f"{where}.elements[{i}]", levels + 1) for i, part in enumerate(elements)]
            if not parts:
                raise GrammarError(f"{where}.elements must not be empty")
            return self._rule(" ".join(parts) if kind == "sequence" else " | ".join(parts))
        if kind in ("optional", "star", "plus"):
            sign = {"optional": "?", "star": "*", "plus": "+"}[kind]
            return f"{self._rule(self.format(given.get('content'), f'{where}.content', levels + 1))}{sign}"
        if kind == "tag":
            return self.literal(_part(given, "begin", str, where)) + " " + self._inside(given, where, levels)
        if kind == "triggered_tags":
            return self._triggered(given, where, levels)
        if kind == "tags_with_separator":
            return self._separated(given, where, levels)
        return self._leaf(kind, given, where)

    def literal(self, text: str) -> str:
        """A fixed text in Lark, with special tokens in it as tokens."""
        parts = []
        position = 0
        for found in self._split.finditer(text) if self._split else ():
            parts += [_quoted(text[position : found.start()]), f"<[{self._special[found[0]]}]>"]
            position = found.end()
        parts.append(_quoted(text[position:]))
        return " ".join(part for part in parts if part) or '""'

    def _leaf(self, kind: Any, given: Mapping[str, Any], where: str) -> str:
        match kind:
            case "const_string":
                return self.literal(_part(given, "value", str, where))
            case "json_schema":
                if given.get("style", "json") != "json":
                    raise GrammarError(f"{where}.style {given['style']!r} is not supported, only json is")
                return self._rule(f"%json {self._schema_text(given.get('json_schema'))}")
            case "regex":
                pattern = _part(given, "pattern", str, where)
                check_pattern(pattern)
                return self._terminal(pattern)
            case "grammar":
                rule, lines = ebnf.to_lark(_part(given, "grammar", str, where), f"g{len(self.lines)}_")
                self.lines += lines
                return rule
            case "any_text":
                return FREE
        known = "sequence, or, optional, star, plus, tag, triggered_tags, tags_with_separator, const_string, "
        raise GrammarError(f"{where}.type must be {known}json_schema, regex, grammar or any_text, got {kind!r:.60}")

    def _inside(self, tag: Mapping[str, Any], where: str, levels: int) -> str:
        """The expression of a tag's content and its end."""
        content = tag.get("content")
        ends = tag.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise GrammarError(f"{where}.end must be a text or a list of texts")
        if isinstance(content, dict) and content.get("type") == "any_text":
            return self._rule(" | ".join(map(self._until, ends)))
        return (
            self.format(content, f"{where}.content", levels + 1) + " " + self._rule(" | ".join(map(self.literal, ends)))
        )

    def _until(self, end: str) -> str:
        """The expression of free text up to a fixed text, and of that text."""
        found = self._split.match(end) if self._split else None
        if found:
            return f"{FREE}? {self.literal(end)}"
        if not end:
            return f"{FREE}?"
        first = self._split.search(end) if self._split else None
        plain = end if first is None else end[: first.start()]
        self.lines.append(f"u{len(self.lines)}[lazy]: {FREE} {_quoted(plain)}")
        name = f"u{len(self.lines) - 1}"
        return name if first is None else f"{name} {self.literal(end[first.start() :])}"

    def _triggered(self, given: Mapping[str, Any], where: str, levels: int) -> str:
        triggers = _part(given, "triggers", list, where)
        if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise GrammarError(f"{where}.triggers must be texts, and at least one")
        options = []
        for i, tag in enumerate(_tags(given, where)):
            begin = _part(tag, "begin", str, f"{where}.tags[{i}]")
            trigger = max((t for t in triggers if begin.startswith(t)), key=len, default=None)
            if trigger is None:
                raise GrammarError(f"{where}.tags[{i}].begin {begin!r:.60} begins with none of the triggers")
            rest = begin[len(trigger) :]
            head = self._until(trigger) + (f" {self.literal(rest)}" if rest else "")
            options.append(f"{head} {self._inside(tag, f'{where}.tags[{i}]', levels)}")
        one = self._rule(" | ".join(options))
        if given.get("stop_after_first"):
            return one if given.get("at_least_one") else self._rule(f"{one} | {FREE}?")
        return f"{one}{'+' if given.get('at_least_one') else '*'} {FREE}?"

    def _separated(self, given: Mapping[str, Any], where: str, levels: int) -> str:
        separator = self.literal(_part(given, "separator", str, where))
        tags = [self.format(tag, f"{where}.tags[{i}]", levels + 1) for i, tag in enumerate(_tags(given, where))]
        one = self._rule(" | ".join(tags))
        several = one if given.get("stop_after_first") else self._rule(f"{one} ({separator} {one})*")
        return several if given.get("at_least_one") else f"{several}?"

    def _rule(self, body: str) -> str:
        self.lines.append(f"s{len(self.lines)}: {body}")
        return f"s{len(self.lines) - 1}"

    def _terminal(self, pattern: str) -> str:
        escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
        self.lines.append(f"S{len(self.lines)}: /{_one_line(escaped)}/")
        return f"S{len(self.lines) - 1}"


def _one_line(pattern: str) -> str:
    return pattern.replace("\n", "\\n")


def _tags(given: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    tags = _part(given, "tags", list, where)
    if not tags or not all(isinstance(tag, dict) for tag in tags):
        raise GrammarError(f"{where}.tags must be objects, and at least one")
    return [{"type": "tag", **tag} for tag in tags]


def _part(given: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = given.get(name)
    if not isinstance(value, kind):
        names: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
        what = names[kind]
        raise GrammarError(f"{where} must have {name}, {what}")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
