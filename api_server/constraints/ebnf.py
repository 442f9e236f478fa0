"""Translates EBNF, as llama.cpp (GBNF), xgrammar and SGLang write it, to llguidance's Lark.

    root ::= "yes" | "no" why?      # rules `name ::= ...`, begins at `root`
    why  ::= [a-z ]+ {1,3}          # literals, classes, ( ), |, *, +, ?, {n}, {n,}, {n,m}, `.`

llguidance's lexer takes the longest match, so where two terminals meet they can get in each other's way. Every part
that is not recursive therefore becomes one regular expression, which is exact; a grammar without recursion is one as a
whole. Knows both notations; knows no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from api_server.constraints.limits import MOST_REPEATS
from shared.grammar import GrammarError

# Most characters of a regular expression that rules without recursion make together.
MOST_EXPANDED = 256 * 1024
# Most levels of nested parentheses, and of rules that name each other.
MOST_LEVELS = 100

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<rule>[A-Za-z_][\w.-]*)(?=(?:\s|\#[^\n]*)*::=)
    |(?P<name>[A-Za-z_][\w.-]*)
    |(?P<define>::=)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<chars>\[(?:[^\]\\]|\\.)*\])
    |(?P<times>\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<look>\(=)
    |(?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "f": "\f", "v": "\v", "b": "\b", "a": "\a"}


@dataclass(frozen=True)
class Text:
    """A fixed text, perhaps empty."""

    text: str


@dataclass(frozen=True)
class Chars:
    """One character, as a regular expression."""

    pattern: str


@dataclass(frozen=True)
class Name:
    name: str
    position: int


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    part: Node
    least: int
    most: int | None


Node = Text | Chars | Name | Sequence | Choice | Repeat


def to_lark(source: str, prefix: str = "") -> tuple[str, list[str]]:
    """The name of the root rule, and the lines of Lark; `prefix` keeps the rules of two grammars apart."""
    rules = _Parser(source).rules()
    if "root" not in rules:
        raise GrammarError("there is no rule `root ::= ...`, at which it begins")
    return _Writer(rules, prefix).write()


class _Parser:
    """Recursive descent over tokens."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = list(self._read(source))
        self._next = 0
        self._levels = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._kind() != "end":
            kind, name, position = self._take()
            if kind != "rule":
                self._fail(f"a rule `name ::= ...` must begin here, not {name!r:.40}", position)
            self._take()
            if name in rules:
                self._fail(f"the rule {name} is there twice", position)
            rules[name] = self._choice()
        return rules

    def _read(self, source: str) -> Iterator[tuple[str, str, int]]:
        position = 0
        while position < len(source):
            found = _TOKEN.match(source, position)
            if found is None or found.lastgroup is None:
                self._fail(f"{source[position : position + 20]!r} is not understood", position)
            if found.lastgroup == "look":
                self._fail("looking ahead with (= is not supported", position)
            if found.lastgroup != "space":
                yield found.lastgroup, found[0], position
            position = found.end()
        yield "end", "the end", len(source)

    def _choice(self) -> Node:
        self._levels += 1
        if self._levels > MOST_LEVELS:
            self._fail(f"parentheses are nested more than {MOST_LEVELS} deep", self._tokens[self._next][2])
        options = [self._sequence()]
        while self._tokens[self._next][1] == "|":
            self._take()
            options.append(self._sequence())
        self._levels -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._kind() in ("name", "text", "chars") or self._tokens[self._next][1] in ("(", "."):
            parts.append(self._repeated(self._primary()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _primary(self) -> Node:
        kind, text, position = self._take()
        if kind == "name":
            return Name(text, position)
        if kind == "text":
            return Text("".join(char for char, _ in _characters(text[1:-1])))
        if kind == "chars":
            return Chars(self._class(text[1:-1], position))
        if text == ".":
            return Chars("(?s:.)")
        inner = self._choice()
        _, closing, position = self._take()
        if closing != ")":
            self._fail(f"a ) is missing before {closing!r:.40}", position)
        return inner

    def _repeated(self, part: Node) -> Node:
        while self._kind() == "times" or self._tokens[self._next][1] in ("*", "+", "?"):
            _, sign, position = self._take()
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign) or self._times(sign, position)
            part = Repeat(part, least, most)
        return part

    def _times(self, sign: str, position: int) -> tuple[int, int | None]:
        low, comma, high = (piece.strip() for piece in sign[1:-1].partition(","))
        if not low and not high:
            self._fail(f"{sign} says no number", position)
        least = int(low or 0)
        most = int(high) if high else None if comma else int(low)
        if max(least, most or 0) > MOST_REPEATS:
            self._fail(f"the repetition {sign:.40} is above {MOST_REPEATS}, the most possible", position)
        if most is not None and most < least:
            self._fail(f"the repetition {sign:.40} ends before it begins", position)
        return least, most

    def _class(self, body: str, position: int) -> str:
        negated = body.startswith("^")
        chars = list(_characters(body[1:] if negated else body))
        ranges = []
        i = 0
        while i < len(chars):
            low = high = chars[i][0]
            if i + 2 < len(chars) and chars[i + 1] == ("-", False):
                high = chars[i + 2][0]
                i += 2
            if high < low:
                self._fail(f"the range {low}-{high} ends before it begins", position)
            ranges.append(f"{_escaped(low)}-{_escaped(high)}" if high > low else _escaped(low))
            i += 1
        if not ranges:
            self._fail("a class of characters is empty", position)
        return f"[{'^' if negated else ''}{''.join(ranges)}]"

    def _kind(self) -> str:
        return self._tokens[self._next][0]

    def _take(self) -> tuple[str, str, int]:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _fail(self, why: str, position: int) -> NoReturn:
        line = self._source.count("\n", 0, position) + 1
        raise GrammarError(f"line {line}: {why}")


class _Writer:
    """Writes recursive rules as rules, and all between them as terminals."""

    def __init__(self, rules: Mapping[str, Node], prefix: str) -> None:
        self._rules = rules
        self._prefix = prefix
        self._regular = _regular_rules(rules)
        self._patterns: dict[str, str] = {}
        self._names = {name: f"{prefix}r{i}" for i, name in enumerate(rules)}
        self._terminals: dict[str, str] = {}

    def write(self) -> tuple[str, list[str]]:
        if "root" in self._regular:
            body = self._node(self._rules["root"])
            return self._names["root"], [f"{self._names['root']}: {body}", *self._terminal_lines()]
        lines = [
            f"{self._names[name]}: {self._node(node)}"
            for name, node in self._rules.items()
            if name not in self._regular
        ]
        return self._names["root"], lines + self._terminal_lines()

    def _terminal_lines(self) -> list[str]:
        return [f"{name}: /{pattern}/" for pattern, name in self._terminals.items()]

    def _node(self, node: Node) -> str:
        """A node in Lark."""
        if self._is_regular(node):
            return self._terminal(node)
        match node:
            case Name():
                return self._names[node.name]
            case Sequence():
                return " ".join(self._node(part) for part in self._merged(node.parts, Sequence)) or '""'
            case Choice():
                options = sorted(node.options, key=self._is_regular)
                return "(" + " | ".join(self._node(part) for part in self._merged(options, Choice)) + ")"
            case Repeat():
                times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, node.most))
                most = "" if node.most is None else node.most
                return f"({self._node(node.part)}){times or f'{{{node.least},{most}}}'}"
        raise TypeError(f"{node} is regular")

    def _merged(self, parts: tuple[Node, ...] | list[Node], join: Callable[[tuple[Node, ...]], Node]) -> Iterator[Node]:
        """Joins neighbours that are regular to one node."""
        run: list[Node] = []
        for part in parts:
            if self._is_regular(part):
                run.append(part)
                continue
            if run:
                yield join(tuple(run))
                run = []
            yield part
        if run:
            yield join(tuple(run))

    def _terminal(self, node: Node) -> str:
        pattern = self._pattern(node)
        if not pattern:
            return '""'
        name = self._terminals.setdefault(pattern, f"{self._prefix.upper()}T{len(self._terminals)}")
        # A terminal has at least one character.
        return f"{name}?" if _may_be_empty(node, self._rules) else name

    def _pattern(self, node: Node) -> str:
        match node:
            case Text():
                pattern = "".join(map(_escaped, node.text))
            case Chars():
                pattern = node.pattern
            case Name():
                if node.name not in self._patterns:
                    self._patterns[node.name] = self._pattern(self._rules[node.name])
                pattern = self._patterns[node.name]
            case Sequence():
                pattern = self._joined([self._grouped(part) for part in node.parts], "")
            case Choice():
                pattern = self._joined([self._pattern(part) for part in node.options], "|")
            case Repeat():
                most = "" if node.most is None else node.most
                inner = self._pattern(node.part)
                pattern = f"(?:{inner}){{{node.least},{most}}}" if inner else ""
        return pattern

    def _grouped(self, node: Node) -> str:
        pattern = self._pattern(node)
        return pattern if isinstance(node, Text | Chars | Repeat) else f"(?:{pattern})"

    def _joined(self, patterns: list[str], sign: str) -> str:
        if sum(map(len, patterns)) > MOST_EXPANDED:
            raise GrammarError(f"its rules, put into each other, have more than {MOST_EXPANDED} characters")
        return sign.join(patterns)

    def _is_regular(self, node: Node) -> bool:
        return all(name.name in self._regular for name in _names(node))


def _regular_rules(rules: Mapping[str, Node]) -> set[str]:
    """Rules that reach no recursive rule. GrammarError for a name without a rule."""
    uses: dict[str, set[str]] = {}
    for name, node in rules.items():
        uses[name] = {used.name for used in _names(node)}
        for used in uses[name] - rules.keys():
            raise GrammarError(f"the rule {name} uses {used}, which is not there")
    regular: set[str] = set()
    for _ in range(MOST_LEVELS):
        more = {name for name in rules.keys() - regular if uses[name] <= regular}
        if not more:
            break
        regular |= more
    return regular


def _names(node: Node) -> Iterator[Name]:
    stack: list[Node] = [node]
    while stack:
        found = stack.pop()
        match found:
            case Name():
                yield found
            case Sequence():
                stack += found.parts
            case Choice():
                stack += found.options
            case Repeat():
                stack.append(found.part)


def _may_be_empty(node: Node, rules: Mapping[str, Node]) -> bool:
    match node:
        case Text():
            return not node.text
        case Chars():
            return False
        case Name():
            return _may_be_empty(rules[node.name], rules)
        case Sequence():
            return all(_may_be_empty(part, rules) for part in node.parts)
        case Choice():
            return any(_may_be_empty(part, rules) for part in node.options)
        case Repeat():
            return node.least == 0 or _may_be_empty(node.part, rules)


def _characters(body: str) -> Iterator[tuple[str, bool]]:
    """Yields each character of a literal or class, and whether it was escaped."""
    position = 0
    while position < len(body):
        found = _ESCAPE.match(body, position)
        if found is None:
            yield body[position], False
            position += 1
            continue
        code = found[1] or found[2] or found[3]
        yield (_code_point(code) if code else _SIMPLE.get(found[4], found[4])), True
        position = found.end()


def _code_point(code: str) -> str:
    number = int(code, 16)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        raise GrammarError(f"U+{code} is no character")
    return chr(number)


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
