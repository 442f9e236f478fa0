"""Reads one answer: takes tokens and their text, gives pieces, and decides when to stop.

Knows what a request wants of reasoning and of calls. Knows no format, and nothing of how tokens are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from api_server.parsers.answer import AnswerParser, ParsedAnswer, merged
from api_server.parsers.reasoning import MarkedReasoning
from api_server.parsers.scanner import Piece, Thought
from api_server.text.stops import Stops
from interfaces import ParsedToolCallDelta, TextGenerationRequest


class AnswerReader:
    """State of one answer. `finder` counts its reasoning; `thinking`: the prompt leaves the model within it."""

    def __init__(
        self, parser: AnswerParser, finder: MarkedReasoning | None, thinking: bool, request: TextGenerationRequest
    ) -> None:
        # All pieces so far.
        self.answer = ParsedAnswer()
        # Tokens of reasoning, its markers included.
        self.reasoning_tokens = 0
        # Stop strings and patterns for the answer's visible text.
        self.stops: Stops | None = None
        self._parser = parser
        self._finder = finder
        self._thinking = thinking
        self._most_calls = request.most_calls
        self._inline = not request.separate_reasoning
        self._at_once = not request.stream_reasoning
        self._budget = request.max_thinking_tokens
        self._thoughts: list[str] = []
        self._pieces: list[Piece] = []

    @property
    def enough(self) -> bool:
        """True when all calls that are wanted are there."""
        return self._most_calls is not None and self._parser.completed_calls >= self._most_calls

    @property
    def _stopped(self) -> bool:
        return self.stops is not None and self.stops.matched is not None

    @property
    def exhausted(self) -> bool:
        """True when the reasoning budget is reached and the model still reasons."""
        return self._thinking and self._budget is not None and self.reasoning_tokens >= self._budget

    def add(self, token: int, text: str) -> None:
        """Adds a token, and the text that it completes."""
        if self._finder is not None:
            self._count(token, self._finder)
        self.feed(text)

    def feed(self, text: str) -> None:
        if text and not self._stopped:
            self._add_pieces(self._parser.feed(text))

    def finish(self, cut: bool) -> None:
        """Ends the answer and releases held-back text. `cut`: something other than the model ended it."""
        if not (self.enough or self._stopped):
            self._add_pieces(self._parser.finish(cut))
        self._add_thoughts()
        self._add_held()

    def take(self) -> Sequence[Piece]:
        """The pieces since the last call."""
        pieces = merged(self._pieces)
        self._pieces = []
        self.answer.add(pieces)
        return pieces

    def _count(self, token: int, finder: MarkedReasoning) -> None:
        found = finder.stream([token], self._thinking)
        start, end = found.span.reasoning_with_delimiters
        self.reasoning_tokens += end - start
        self._thinking = found.is_still_reasoning
        if not self._thinking and not finder.repeats and (self.reasoning_tokens or finder.has_passed):
            self._finder = None

    def _add_pieces(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Thought) and self._inline:
                self._add_text(ParsedToolCallDelta(0, content=piece.text))
            elif isinstance(piece, Thought):
                self._add_held()
                if self._at_once:
                    self._thoughts.append(piece.text)
                else:
                    self._pieces.append(piece)
            else:
                self._add_thoughts()
                self._add_text(piece)
            if self._stopped:
                return

    def _add_text(self, piece: ParsedToolCallDelta) -> None:
        """Adds visible text as far as its stops release it, or part of a call, which the stops do not see."""
        if piece.content is None or self.stops is None:
            self._add_held()
            self._pieces.append(piece)
        elif text := self.stops.add(piece.content):
            self._pieces.append(replace(piece, content=text))

    def _add_held(self) -> None:
        if self.stops is not None and (text := self.stops.flush()):
            self._pieces.append(ParsedToolCallDelta(0, content=text))

    def _add_thoughts(self) -> None:
        if self._thoughts:
            self._pieces.append(Thought("".join(self._thoughts)))
            self._thoughts = []
