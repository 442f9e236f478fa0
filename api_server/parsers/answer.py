"""Parses one answer as its text comes, and joins the pieces in order: reasoning, text and calls.

Chains readers of reasoning and of calls. Does not know formats, tokens or dialects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from api_server.parsers.calls import Calls
from api_server.parsers.harmony import harmony
from api_server.parsers.registry import ReasoningFormat, ToolFormat
from api_server.parsers.scanner import Machine, Piece, Scanner, Thought
from interfaces import ParsedToolCall, ParsedToolCallDelta, ParsedToolResponse

# A whole text is read in slices, which keeps the time linear in its length.
_SLICE = 4096


class AnswerParser:
    """Parser state of one answer, which depends only on its text. Parts without a format stay text."""

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        schemas: Mapping[str, Any] | None = None,
        opened: bool = False,
        forced: bool = False,
    ) -> None:
        """Makes a parser. `schemas` are those of the tools' parameters, by name.

        `opened`: the prompt leaves the model in reasoning. `forced`: besides reasoning there is nothing but calls.
        """
        self._calls = Calls(schemas, tools.new_id, forced) if tools is not None else Calls(schemas)
        self._stages: list[Machine] = []
        one_reader = any(each is not None and each.name == "harmony" for each in (tools, reasoning))
        if one_reader:
            self._add(harmony)
            return
        if reasoning is not None:
            self._add(reasoning.reader(opened))
        if tools is not None:
            self._add(tools.read)

    @property
    def completed_calls(self) -> int:
        return self._calls.completed

    @property
    def within_call(self) -> bool:
        """True when a call has begun and is not complete."""
        return self._calls.begun > self._calls.completed

    def feed(self, text: str) -> list[Piece]:
        """Adds text; returns the pieces that it decides."""
        pieces: list[Piece] = [self._calls.content(text)] if text else []
        for stage in self._stages:
            pieces = _through(stage, pieces)
        return pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        """Ends the text; returns the held-back pieces.

        `cut`: a beginning of a mark or a call is the rest of a cut one.
        """
        pieces: list[Piece] = []
        for stage in self._stages:
            pieces = [*_through(stage, pieces), *stage.finish(cut)]
        return pieces

    def _add(self, read: Any) -> None:
        scanner = Scanner()
        self._stages.append(Machine(scanner, read(scanner, self._calls), self._calls.content))


def _through(stage: Machine, pieces: Iterable[Piece]) -> list[Piece]:
    """Passes the plain text among the pieces through a stage; other pieces pass unchanged."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, ParsedToolCallDelta) and piece.content is not None:
            found += stage.feed(piece.content)
        else:
            found.append(piece)
    return found


@dataclass
class Call:
    """A call that grows with its pieces."""

    id: str
    name: str
    fragments: list[str] = field(default_factory=list)

    @property
    def parsed(self) -> ParsedToolCall:
        return ParsedToolCall(self.id, self.name, "".join(self.fragments))


@dataclass
class Passage:
    """Reasoning or plain text that grows with its pieces."""

    is_thought: bool
    fragments: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.fragments)


Block = Passage | Call


@dataclass
class ParsedAnswer:
    """The blocks of an answer, in order; neighbouring pieces of a kind are one block."""

    blocks: list[Block] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Thought):
                self._passage(True).fragments.append(piece.text)
            elif piece.content is not None:
                self._passage(False).fragments.append(piece.content)
            else:
                if piece.name is not None:
                    self.blocks.append(Call(piece.id or "", piece.name))
                call = self.blocks[-1]
                if isinstance(call, Call) and piece.arguments:
                    call.fragments.append(piece.arguments)

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if isinstance(block, Passage) and not block.is_thought)

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if isinstance(block, Passage) and block.is_thought)

    @property
    def calls(self) -> list[ParsedToolCall]:
        return [block.parsed for block in self.blocks if isinstance(block, Call)]

    def _passage(self, is_thought: bool) -> Passage:
        last = self.blocks[-1] if self.blocks else None
        if not isinstance(last, Passage) or last.is_thought != is_thought:
            last = Passage(is_thought)
            self.blocks.append(last)
        return last


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins neighbouring pieces of a kind."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Thought):
            if isinstance(last, Thought):
                found[-1] = Thought(last.text + piece.text)
                continue
        elif isinstance(last, ParsedToolCallDelta) and _continues(piece, last):
            content = _joined(last.content, piece.content)
            arguments = _joined(last.arguments, piece.arguments)
            found[-1] = replace(last, content=content, arguments=arguments)
            continue
        found.append(piece)
    return found


def _continues(piece: ParsedToolCallDelta, last: ParsedToolCallDelta) -> bool:
    if piece.content is not None:
        return last.content is not None
    return piece.name is None and piece.index == last.index and last.content is None


def _joined(first: str | None, second: str | None) -> str | None:
    return first if second is None else (first or "") + second


def text_of(pieces: Iterable[Piece]) -> str:
    """The plain text among the pieces."""
    return "".join(piece.content or "" for piece in pieces if isinstance(piece, ParsedToolCallDelta))


def parse(parser: AnswerParser, text: str) -> ParsedAnswer:
    """Parses a whole text."""
    answer = ParsedAnswer()
    for at in range(0, len(text), _SLICE):
        answer.add(parser.feed(text[at : at + _SLICE]))
    answer.add(parser.finish())
    return answer


class FormatToolParser:
    """The `ToolParser` of one format. `finish` returns the held-back text when the stream ends."""

    def __init__(self, tools: ToolFormat, schemas: Mapping[str, Any] | None = None) -> None:
        self._tools = tools
        self._schemas = schemas
        self.reset()

    def reset(self) -> None:
        self._parser = AnswerParser(self._tools, None, self._schemas)

    def parse_complete(self, response: str) -> ParsedToolResponse:
        answer = parse(AnswerParser(self._tools, None, self._schemas), response)
        return ParsedToolResponse(answer.text or None, answer.calls)

    def parse_delta(self, delta: str) -> list[ParsedToolCallDelta] | None:
        pieces = _deltas(self._parser.feed(delta))
        return pieces or ([] if self._parser.within_call else None)

    def finish(self) -> list[ParsedToolCallDelta]:
        return _deltas(self._parser.finish())


def _deltas(pieces: Sequence[Piece]) -> list[ParsedToolCallDelta]:
    return [piece for piece in pieces if isinstance(piece, ParsedToolCallDelta)]
