"""Which formats a server has, and the grammars that its requests need."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api_server.answers.formats import AnswerFormats
from api_server.text.tokenizer import Tokenizer
from interfaces.base.request_id import RequestID
from interfaces.request.constraint import Constraint, ConstraintKind
from interfaces.request.requests import TextGenerationRequest
from shared.settings import Settings
from tests.api_server.conftest import encode

SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def asked(**more: Any) -> TextGenerationRequest:
    messages: Any = [{"role": "user", "content": "hi"}]
    return TextGenerationRequest(RequestID("r"), messages=messages, parse_answer=True, **more)


@pytest.fixture
def formats(tokenizer: Tokenizer) -> AnswerFormats:
    return AnswerFormats.of(Settings(tool_parser="hermes"), tokenizer)


def test_settings_choose_and_the_template_shows(tokenizer: Tokenizer) -> None:
    shown = AnswerFormats.of(Settings(), tokenizer)
    assert shown.tools is not None
    assert shown.reasoning is not None
    assert (shown.tools.name, shown.reasoning.name) == ("llama3_json", "think")
    nothing = AnswerFormats.of(Settings(tool_parser="none", reasoning_parser="none"), tokenizer)
    assert (nothing.tools, nothing.reasoning) == (None, None)
    forced = nothing.tools_for(asked(tools=[tool("f")], forced_tools=["f"]))
    assert forced is not None
    assert forced.name == "json"
    for name, wrong in (
        ("tool_parser", Settings(tool_parser="telepathy")),
        ("reasoning_parser", Settings(reasoning_parser="telepathy")),
    ):
        with pytest.raises(ValueError, match=f"{name} must be one of .* got 'telepathy'"):
            AnswerFormats.of(wrong, tokenizer)


def test_a_forced_call_has_a_grammar(formats: AnswerFormats) -> None:
    made = formats.constrained(asked(tools=[tool("f"), tool("g")], forced_tools=["g"]), [5]).constraint
    assert made is not None
    assert (made.kind, made.field, made.begins_after) == (ConstraintKind.LARK, "tools", "")
    assert "start: thought? calls" in made.source
    assert '\\"g\\"' in made.source
    assert '\\"f\\"' not in made.source
    quiet = asked(tools=[tool("f")], forced_tools=["f"], chat_template_options={"enable_thinking": False})
    made = formats.constrained(quiet, [5]).constraint
    assert made is not None
    assert made.source.startswith("start: calls\n")


def test_a_form_begins_after_the_reasoning_that_the_prompt_opens(formats: AnswerFormats, tokenizer: Tokenizer) -> None:
    prompt = encode(tokenizer, "<|im_start|>assistant\n<think>\n")
    for more in ({"tools": [tool("f")], "forced_tools": ["f"]}, {"constraint": Constraint(ConstraintKind.REGEX, "a")}):
        for ids, after in ((prompt, "</think>"), (prompt[:3], "")):
            made = formats.constrained(asked(**more), ids).constraint
            assert made is not None
            assert made.begins_after == after
    assert formats.constrained(asked(), prompt).constraint is None


def test_reasoning_is_opened_where_a_form_is_to_begin_after_it(formats: AnswerFormats) -> None:
    thinking = {"chat_template_options": {"enable_thinking": True}}
    form = {"constraint": Constraint(ConstraintKind.REGEX, "a")}
    assert formats.opened(asked(**thinking, **form)).opening == "<think>\n"
    for more in ({}, thinking, form):
        assert formats.opened(asked(**more)).opening == ""


def test_reasoning_is_opened_for_strict_tools_whose_grammar_has_no_place_for_its_mark(formats: AnswerFormats) -> None:
    thinking = {"chat_template_options": {"enable_thinking": True}}
    strict = {"tools": [tool("f"), {"type": "function", "function": {"name": "g", "strict": True}}]}
    assert formats.opened(asked(**thinking, **strict)).opening == "<think>\n"
    assert formats.opened(asked(**strict)).opening == ""
    assert formats.opened(asked(**thinking, tools=[tool("f")])).opening == ""


async def test_what_is_opened_is_part_of_the_prompt_once(tokenizer: Tokenizer) -> None:
    for options, opening in (({}, "<think>\n"), ({"enable_thinking": True}, "<think>\n"), ({}, "")):
        request = asked(chat_template_options=options, opening=opening)
        text = (await tokenizer.prompt(request, None)).text or ""
        assert text.count("<think>") == bool(options or opening)
        assert text.rstrip().endswith("<think>" if options or opening else "assistant")


def test_calls_may_stand_beside_a_document(formats: AnswerFormats) -> None:
    document = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object"}', field="response_format")
    made = formats.constrained(asked(tools=[tool("f")], constraint=document), [5]).constraint
    assert made is not None
    assert (made.kind, made.field) == (ConstraintKind.LARK, "response_format")
    assert "answer: calls | document" in made.source
    pattern = Constraint(ConstraintKind.REGEX, "a")
    assert formats.constrained(asked(tools=[tool("f")], constraint=pattern), [5]).constraint == pattern


def test_strict_tools_constrain_calls_that_the_model_chooses_to_make(formats: AnswerFormats) -> None:
    assert formats.constrained(asked(tools=[tool("f", strict=False)]), [5]).constraint is None
    made = formats.constrained(asked(tools=[tool("f", strict=True), tool("g")]), [5]).constraint
    assert made is not None
    assert (made.kind, made.field) == (ConstraintKind.STRUCTURAL_TAG, "tools")
    assert json.loads(made.source) == {
        "type": "structural_tag",
        "structures": [
            {"begin": '<tool_call>\n{"name": "f", "arguments": ', "schema": SCHEMA, "end": "}\n</tool_call>"},
            {
                "begin": '<tool_call>\n{"name": "g", "arguments": ',
                "schema": {"type": "object"},
                "end": "}\n</tool_call>",
            },
        ],
        "triggers": ["<tool_call>"],
    }
