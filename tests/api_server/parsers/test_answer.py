"""Every format: what was written is read, and no split of a text changes what is read."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.parsers.answer import AnswerParser, Call, FormatToolParser, ParsedAnswer, merged, parse
from api_server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from api_server.parsers.scanner import Piece, Thought
from interfaces.pipelines.parsers import ParsedToolCallDelta, ToolParser
from tests.api_server.parsers import formats
from tests.api_server.parsers.formats import SCHEMAS, SCRAPS, TEXT_BEFORE, WRITERS

TOOLS = sorted(TOOL_FORMATS)
REASONING = sorted(REASONING_FORMATS)
WORDS = st.text("abc xyz,.!?\n", max_size=20)


def facts(answer: ParsedAnswer) -> list[Any]:
    """Of an answer, without the ids that were drawn."""
    return [
        (block.name, block.parsed.arguments) if isinstance(block, Call) else (block.is_thought, block.text)
        for block in answer.blocks
    ]


def streamed(parser: AnswerParser, pieces: list[str]) -> ParsedAnswer:
    answer = ParsedAnswer()
    for piece in pieces:
        answer.add(parser.feed(piece))
    answer.add(parser.finish())
    return answer


def test_every_format_is_tested() -> None:
    assert set(WRITERS) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", TOOLS)
@given(calls=formats.calls(), before=WORDS, seed=st.integers(0, 2**32))
def test_calls_are_read_as_they_were_written(name: str, calls: Any, before: str, seed: int) -> None:
    before = before.strip() if name in TEXT_BEFORE else ""
    text = before + "\n" + WRITERS[name](calls) if before else WRITERS[name](calls)
    whole = parse(AnswerParser(tool_format(name), None, SCHEMAS), text)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls
    assert whole.text == before
    assert len({call.id for call in whole.calls}) == len(calls)
    parts = streamed(AnswerParser(tool_format(name), None, SCHEMAS), formats.cut(text, random.Random(seed)))
    assert facts(parts) == facts(whole)


@pytest.mark.parametrize("name", TOOLS)
@given(
    scraps=st.lists(st.sampled_from(SCRAPS), max_size=14),
    calls=formats.calls(),
    seed=st.integers(0, 2**32),
    schemas=st.sampled_from([SCHEMAS, {}]),
)
def test_no_split_changes_what_is_read(name: str, scraps: list[str], calls: Any, seed: int, schemas: Any) -> None:
    rng = random.Random(seed)
    text = "".join(scraps)
    if rng.random() < 0.7:
        # Something that begins as it should, and is broken off or spoilt.
        written = WRITERS[name](calls)
        at = rng.randrange(len(written) + 1)
        text = text[: rng.randrange(len(text) + 1)] * (rng.random() < 0.5) + written[:at] + text + written[at:]
    whole = parse(AnswerParser(tool_format(name), None, schemas), text)
    for _ in range(3):
        parts = streamed(AnswerParser(tool_format(name), None, schemas), formats.cut(text, rng))
        assert facts(parts) == facts(whole)
    assert facts(streamed(AnswerParser(tool_format(name), None, schemas), list(text))) == facts(whole)


@pytest.mark.parametrize("name", REASONING)
@given(
    scraps=st.lists(st.sampled_from(SCRAPS) | WORDS, max_size=12),
    opened=st.booleans(),
    tools=st.sampled_from([None, *TOOLS]),
    seed=st.integers(0, 2**32),
)
def test_no_split_changes_reasoning(name: str, scraps: list[str], opened: bool, tools: str | None, seed: int) -> None:
    rng = random.Random(seed)
    form = reasoning_format(name)
    text = rng.choice(["", rng.choice(form.markers.starts)]) + "".join(scraps)

    def parser() -> AnswerParser:
        return AnswerParser(tool_format(tools) if tools else None, form, SCHEMAS, opened)

    whole = parse(parser(), text)
    for pieces in (list(text), formats.cut(text, rng), formats.cut(text, rng)):
        assert facts(streamed(parser(), pieces)) == facts(whole)


@pytest.mark.parametrize("name", ["think", "deepseek_r1", "mistral", "granite", "kimi"])
@given(thought=WORDS, text=WORDS, opened=st.booleans(), data=st.data())
def test_reasoning_stands_apart(name: str, thought: str, text: str, opened: bool, data: st.DataObject) -> None:
    form = reasoning_format(name)
    start, end = (data.draw(st.sampled_from(marks)) for marks in (form.markers.starts, form.markers.ends))
    written = f"{'' if opened else start}\n{thought}\n{end}\n\n{text}"
    answer = parse(AnswerParser(None, form, None, opened), written)
    assert (answer.reasoning, answer.text) == (thought.strip(), text.lstrip())


@given(text=WORDS, seed=st.integers(0, 2**32))
def test_text_without_marks_stays_as_it_is(text: str, seed: int) -> None:
    for name in TOOLS:
        if name != "harmony":  # there, text outside of messages has no white space of its own
            parser = AnswerParser(tool_format(name), reasoning_format("think"), SCHEMAS)
            answer = streamed(parser, formats.cut(text, random.Random(seed)))
            assert (answer.text, answer.calls, answer.reasoning) == (text, [], "")


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("hermes", "hi <tool_call> no", [(False, "hi <tool_call> no")]),
        ("hermes", '<tool_call>\n{"na', [(False, '<tool_call>\n{"na')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }</tool_call> so', [("f", '{"a": }'), (False, "so")]),
        ("llama3_json", '{"name": "Bob", "parameters": {}}', [(False, '{"name": "Bob", "parameters": {}}')]),
        ("llama3_json", '{"answer": 42}', [(False, '{"answer": 42}')]),
        ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {}}', [("get_weather", "{}")]),
        ("pythonic", "[1, 2]", [(False, "[1, 2]")]),
        ("pythonic", "[get_weather(city=true, days=x y)]", [("get_weather", '{"city": true, "days": "x y"}')]),
        ("harmony", "<|channel|>final<|message|>Hello", [(False, "Hello")]),
        (
            "harmony",
            "<|channel|>analysis<|message|>a<|end|>"
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
            [(True, "a"), ("f", "{}")],
        ),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
    ],
)  # fmt: skip
def test_odd_texts(name: str, text: str, wanted: list[Any]) -> None:
    assert facts(parse(AnswerParser(tool_format(name), None, SCHEMAS), text)) == wanted


def test_ids_are_those_that_the_model_and_its_template_want() -> None:
    kimi = parse(AnswerParser(tool_format("kimi_k2"), None), WRITERS["kimi_k2"]([("f", {}), ("g", {})]))
    assert [call.id for call in kimi.calls] == ["functions.f:0", "functions.g:1"]
    (mistral,) = parse(AnswerParser(tool_format("mistral"), None), "[TOOL_CALLS]f[ARGS]{}").calls
    assert len(mistral.id) == 9
    assert mistral.id.isalnum()


@given(calls=formats.calls(), seed=st.integers(0, 2**32))
def test_the_tool_parser_of_the_interface(calls: Any, seed: int) -> None:
    parser = FormatToolParser(tool_format("hermes"), SCHEMAS)
    assert isinstance(parser, ToolParser)
    text = "So. " + WRITERS["hermes"](calls)
    whole = parser.parse_complete(text)
    assert whole.content == "So."
    for _ in range(2):
        deltas = [
            delta for piece in formats.cut(text, random.Random(seed)) for delta in parser.parse_delta(piece) or ()
        ]
        deltas += parser.finish()
        for index, call in enumerate(whole.tool_calls):
            own = [delta for delta in deltas if delta.index == index and delta.content is None]
            assert [delta.name for delta in own] == [call.name, *[None] * (len(own) - 1)]
            assert own[0].id
            assert "".join(delta.arguments or "" for delta in own) == call.arguments
        assert "".join(delta.content or "" for delta in deltas) == whole.content
        parser.reset()


def test_a_parser_tells_what_belongs_to_a_call_from_what_is_undecided() -> None:
    parser = FormatToolParser(tool_format("hermes"))
    assert parser.parse_delta("<tool") is None
    assert parser.parse_delta('_call>{"na') is None
    begun = parser.parse_delta('me": "f", "argum')
    assert begun is not None
    assert [delta.name for delta in begun] == ["f"]
    assert parser.parse_delta('ents"') == []


@given(st.lists(st.sampled_from(["t", "c", "n", "a"]), max_size=12))
def test_merging_changes_no_answer(kinds: list[str]) -> None:
    pieces: list[Piece] = []
    index = -1
    for i, kind in enumerate(kinds):
        if kind == "t":
            pieces.append(Thought(str(i)))
        elif kind == "c" or (kind == "a" and (not pieces or isinstance(pieces[-1], Thought) or pieces[-1].content)):
            pieces.append(ParsedToolCallDelta(index + 1, content=str(i)))
        elif kind == "n":
            index += 1
            pieces.append(ParsedToolCallDelta(index, id="i", name=str(i)))
        else:
            pieces.append(ParsedToolCallDelta(index, arguments=str(i)))
    plain, joined = ParsedAnswer(), ParsedAnswer()
    plain.add(pieces)
    joined.add(merged(pieces))
    assert facts(joined) == facts(plain)
    assert len(merged(pieces)) == len(plain.blocks)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_cut_leaves_no_marks_in_the_text(name: str) -> None:
    """Wherever forced calls are cut, what is left of them is part of a call, or nothing."""
    text = WRITERS[name]([("get_weather", {"city": "x"}), ("get_weather", {"city": "y"})])
    for at in range(len(text)):
        parser = AnswerParser(TOOL_FORMATS[name], None, SCHEMAS, forced=True)
        answer = ParsedAnswer()
        answer.add([*parser.feed(text[:at]), *parser.finish(cut=True)])
        assert not answer.text or any(mark.startswith(answer.text) for mark in TOOL_FORMATS[name].marks), text[:at]
        assert all(call.name == "get_weather" for call in answer.calls)
