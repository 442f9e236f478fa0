"""Spans of reasoning, and what a reasoning parser says of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interfaces import (
    ParsedReasoningDelta,
    ParsedToolCall,
    ParsedToolCallDelta,
    ParsedToolResponse,
    ReasoningParser,
    ReasoningSpan,
    ToolParser,
)

BEGIN, FINISH = 1, 2


class Marked(ReasoningParser):
    """Reasoning lies between the tokens 1 and 2."""

    def __init__(self) -> None:
        self.resets = 0

    @classmethod
    async def from_tokenizer(cls, tokenizer: Any) -> Self:
        return cls()

    def stream(self, delta_token_ids: Sequence[int], is_currently_reasoning: bool = True) -> ParsedReasoningDelta:
        ids = list(delta_token_ids)
        outer = 0 if is_currently_reasoning else ids.index(BEGIN) if BEGIN in ids else len(ids)
        inner = outer + (not is_currently_reasoning and outer < len(ids))
        end = ids.index(FINISH, inner) if FINISH in ids[inner:] else len(ids)
        closed = end < len(ids)
        span = ReasoningSpan((outer, end + closed), (inner, end))
        return ParsedReasoningDelta(span, outer < len(ids) and not closed)

    def reset(self) -> None:
        self.resets += 1


@given(st.lists(st.integers(0, 9), max_size=12), st.data())
def test_a_span_takes_a_sequence_apart(sequence: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sequence)), min_size=4, max_size=4)))
    span = ReasoningSpan((cuts[0], cuts[3]), (cuts[1], cuts[2]))
    assert span.extract_content(sequence) == sequence[: cuts[0]] + sequence[cuts[3] :]
    assert span.extract_reasoning(sequence) == sequence[cuts[1] : cuts[2]]


def test_a_span_of_text() -> None:
    text = "<think>hm</think>so"
    span = ReasoningSpan((0, 17), (7, 9))
    assert ("".join(span.extract_reasoning(text)), "".join(span.extract_content(text))) == ("hm", "so")


@pytest.mark.parametrize(("outer", "inner"), [((2, 9), (1, 5)), ((0, 3), (1, 4)), ((0, 9), (5, 4))])
def test_an_inner_span_outside_the_outer_one_is_refused(outer: tuple[int, int], inner: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="must lie within"):
        ReasoningSpan(outer, inner)


@pytest.mark.parametrize(
    ("prompt", "reasons"), [([], False), ([5, 6], False), ([5, BEGIN], True), ([BEGIN, 7, FINISH], False)]
)
async def test_a_prompt_may_leave_the_model_reasoning(prompt: list[int], reasons: bool) -> None:
    parser = await Marked.from_tokenizer(None)
    assert parser.will_reason_after_prompt(prompt) is reasons
    assert parser.resets == 1
    assert await Marked.reasoning_end_token_id(None) is None


class Brackets:
    """`[name]` is a call."""

    def parse_complete(self, response: str) -> ParsedToolResponse:
        content, _, call = response.partition("[")
        return ParsedToolResponse(content, [ParsedToolCall("1", call.removesuffix("]"), "{}")] if call else [])

    def parse_delta(self, delta: str) -> list[ParsedToolCallDelta] | None:
        return [ParsedToolCallDelta(0, content=delta)] if "[" not in delta else None

    def reset(self) -> None:
        """There is no state."""


def test_a_tool_parser_is_what_has_its_methods() -> None:
    parser = Brackets()
    assert isinstance(parser, ToolParser)
    assert not isinstance(object(), ToolParser)
    assert parser.parse_complete("so [f]") == ParsedToolResponse("so ", [ParsedToolCall("1", "f", "{}")])
    assert ParsedToolResponse().tool_calls is not ParsedToolResponse().tool_calls
