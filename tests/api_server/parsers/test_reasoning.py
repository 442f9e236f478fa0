"""Reasoning in token ids: the same that is found in the text, counted, and told from what users write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.parsers.reasoning import GraniteReasoning, MarkedReasoning, ThinkReasoning
from api_server.parsers.registry import REASONING_FORMATS
from api_server.text.tokenizer import Tokenizer
from interfaces.pipelines.parsers import ReasoningParser

TOKENS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<th", "ink>", "a", "b ", "\n", "user", "assistant"]
ADDED = {0, 1, 2, 3}


def parser(kind: type[MarkedReasoning] = ThinkReasoning) -> MarkedReasoning:
    return kind(TOKENS.__getitem__, ADDED)


@given(st.lists(st.integers(2, 8), max_size=20), st.lists(st.integers(1, 5), min_size=20, max_size=20))
def test_any_delivery_of_the_tokens_finds_the_same(ids: list[int], sizes: list[int]) -> None:
    def inside(chunks: list[list[int]]) -> list[bool]:
        stream, thinking, found = parser(), False, []
        for chunk in chunks:
            while chunk:
                told = stream.stream(chunk, thinking)
                start, end = told.span.reasoning_with_delimiters
                thinking = told.is_still_reasoning
                consumed = len(chunk) if thinking or end == len(chunk) or start == end else end
                found += [start <= i < end for i in range(consumed)]
                chunk = chunk[consumed:]
        return found

    chunks, rest = [], list(ids)
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    assert inside([*chunks, rest]) == inside([[token] for token in ids])


def test_a_marker_of_several_tokens_is_found() -> None:
    told = parser().stream([6, 4, 5, 6, 6, 3, 7], is_currently_reasoning=False)
    assert (told.span.reasoning_with_delimiters, told.span.reasoning) == ((2, 6), (3, 5))
    assert not told.is_still_reasoning


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ([0, 9, 8, 6, 1, 8, 0, 10, 8], False),
        ([0, 9, 8, 6, 1, 8, 0, 10, 8, 2, 8], True),
        ([0, 9, 8, 6, 1, 8, 0, 10, 8, 2, 8, 8, 3, 8, 8], False),
        ([0, 9, 8, 2, 6, 1, 8, 0, 10, 8], False),
        ([0, 9, 8, 4, 5, 6, 1, 8, 0, 10, 8], False),
        ([0, 10, 8, 2, 6, 7], True),
        ([], False),
    ],
)
def test_only_the_last_turn_of_a_prompt_opens_reasoning(prompt: list[int], opened: bool) -> None:
    assert parser().will_reason_after_prompt(prompt) == opened


async def test_the_end_is_one_token_or_none(tokenizer: Tokenizer) -> None:
    assert isinstance(await ThinkReasoning.from_tokenizer(tokenizer), ReasoningParser)
    assert await ThinkReasoning.reasoning_end_token_id(tokenizer) is None

    class OneToken:
        async def spans(self, text: str, add_special_tokens: bool) -> list[Any]:
            return [type("Span", (), {"id": 7})]

    assert await GraniteReasoning.reasoning_end_token_id(OneToken()) == 7


def test_what_closes_reasoning_closes_it() -> None:
    for form in REASONING_FORMATS.values():
        assert any(end in form.closing for end in form.markers.ends)
