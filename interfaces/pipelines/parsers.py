"""Parsers of model output: the span of reasoning, and the tools that the model calls.

Reasoning is found in token ids, because its markers are tokens; tool calls are found in text. Knows no model's format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

Item = TypeVar("Item")


@dataclass(frozen=True)
class ReasoningSpan:
    """The span of reasoning in a sequence: half-open index pairs, with and without its delimiters.

    AssertionError unless the inner pair lies within the outer one.
    """

    reasoning_with_delimiters: tuple[int, int]
    reasoning: tuple[int, int]

    def __post_init__(self) -> None:
        outer_start, outer_end = self.reasoning_with_delimiters
        start, end = self.reasoning
        if not outer_start <= start <= end <= outer_end:
            raise AssertionError(f"reasoning {self.reasoning} must lie within {self.reasoning_with_delimiters}")

    def extract_content(self, sequence: Sequence[Item]) -> list[Item]:
        """Return everything outside the delimiters."""
        start, end = self.reasoning_with_delimiters
        return [*sequence[:start], *sequence[end:]]

    def extract_reasoning(self, sequence: Sequence[Item]) -> list[Item]:
        """Return everything between the delimiters."""
        return list(sequence[slice(*self.reasoning)])


@dataclass(frozen=True)
class ParsedReasoningDelta:
    """The reasoning in one delta. A formatter's None drops the text."""

    span: ReasoningSpan
    is_still_reasoning: bool
    reasoning_text_formatter: Callable[[str], str | None] | None = None


class ReasoningParser(ABC):
    """Finds the reasoning in a stream of token ids; one object for each request."""

    @classmethod
    @abstractmethod
    async def from_tokenizer(cls, tokenizer: Any) -> Self:
        """Make a parser that knows the ids of its markers. ValueError when the tokenizer lacks them."""

    @classmethod
    async def reasoning_end_token_id(cls, tokenizer: Any) -> int | None:
        """Return the id that ends reasoning; None when the marker is not a single token."""
        return None

    @abstractmethod
    def stream(self, delta_token_ids: Sequence[int], is_currently_reasoning: bool = True) -> ParsedReasoningDelta:
        """Parse the next tokens. When not reasoning yet, only a start marker begins it."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the stream so far."""

    def will_reason_after_prompt(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether the prompt leaves the model within reasoning (many chat templates open it)."""
        try:
            return self.stream(prompt_token_ids, is_currently_reasoning=False).is_still_reasoning
        finally:
            self.reset()


@dataclass
class ParsedToolCall:
    """A whole call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass
class ParsedToolCallDelta:
    """A piece of call number `index`: `id` and `name` come first, then fragments of `arguments`.

    `content` is plain text that preceded the calls.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str | None = None
    content: str | None = None


@dataclass
class ParsedToolResponse:
    """A whole answer, split into text and calls."""

    content: str | None = None
    tool_calls: list[ParsedToolCall] = field(default_factory=list)


@runtime_checkable
class ToolParser(Protocol):
    """Finds tool calls in an answer; one object for each request."""

    def parse_complete(self, response: str) -> ParsedToolResponse:
        """Parse a whole answer. ValueError when it cannot be parsed."""
        ...

    def parse_delta(self, delta: str) -> list[ParsedToolCallDelta] | None:
        """Parse the next text of a stream.

        Returns pieces to emit; `[]`: the text belongs to a call and must not be shown; None: undecided, keep the text.
        """
        ...

    def reset(self) -> None:
        """Forget the stream so far."""
        ...
