"""What the grammars of forced calls allow is read as calls of the tools, with arguments of their schemas."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from api_server.parsers.answer import AnswerParser, parse
from api_server.parsers.call_grammar import FORMS, MOST_CALLS, CallGrammar
from api_server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat
from tests.api_server.conftest import byte_level_backend

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "unit": {"type": "string", "enum": ["°C", "°F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {"utc": {"type": "boolean"}}, "additionalProperties": False},
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}


@cache
def vocabulary(special: bool) -> tuple[Backend, LLTokenizer]:
    """One tokenizer for all formats, whose marks are special tokens or plain added ones."""
    backend = byte_level_backend()
    forms: list[ToolFormat | ReasoningFormat] = [*TOOL_FORMATS.values(), *REASONING_FORMATS.values()]
    marks = sorted({mark for form in forms for mark in form.marks if " " not in mark})
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return backend, LLTokenizer(backend.to_str(), eos_token=backend.token_to_id("<|im_end|>"))


def walk(grammar: str, special: bool, rng: random.Random) -> str | None:
    """A text that the grammar allows, token by token at random; None when it has become too long."""
    backend, tokenizer = vocabulary(special)
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    end, ids = backend.token_to_id("<|im_end|>"), list[int]()
    for _ in range(400):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        assert allowed, matcher.get_error()
        if end in allowed and (rng.random() < 0.5 or allowed == [end]):
            return str(backend.decode(ids, skip_special_tokens=False))
        # Signs that close something are taken more often, so that the walk comes to an end.
        allowed = [token for token in allowed if token != end]
        closing = [token for token in allowed if set(backend.id_to_token(token) or "") & set('"<')]
        token = rng.choice(closing if closing and rng.random() < 0.4 else allowed)
        assert matcher.consume_token(token)
        ids.append(token)
    return None


def parsed(name: str, text: str, opened: bool = False) -> Any:
    reasoning = REASONING_FORMATS["harmony" if name == "harmony" else "think"]
    return parse(AnswerParser(TOOL_FORMATS[name], reasoning, SCHEMAS, opened), text)


def test_every_format_has_a_form() -> None:
    assert set(FORMS) == set(TOOL_FORMATS)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", sorted(FORMS))
def test_what_is_allowed_is_a_call(name: str, special: bool) -> None:
    token_of = vocabulary(special)[0].token_to_id
    rng, counts = random.Random(random.randrange(2**32)), []
    thought = REASONING_FORMATS["harmony" if name == "harmony" else "think"]
    for round_ in range(8):
        most, thinks = rng.choice([1, 2, None]), thought if round_ % 2 else None
        grammar = CallGrammar(TOOL_FORMATS[name], token_of).source(SCHEMAS, most, thinks)
        text = walk(grammar, special, rng)
        if text is None:
            continue
        answer = parsed(name, text)
        assert not answer.text.strip(), (grammar, text)
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        counts.append(len(answer.calls))
        assert 1 <= counts[-1] <= (most or MOST_CALLS), (grammar, text)
    assert counts


def test_marks_that_are_tokens_cannot_be_spelled() -> None:
    backend, tokenizer = vocabulary(True)
    grammar = CallGrammar(TOOL_FORMATS["hermes"], backend.token_to_id).source(SCHEMAS, 1, None)
    for text, allowed in (("<", False), ("<tool_call>", True)):
        token = backend.token_to_id(text)
        assert token is not None
        assert LLMatcher(tokenizer, grammar).consume_token(token) == allowed


def test_a_document_will_do_as_well() -> None:
    rng, kinds = random.Random(random.randrange(2**32)), set()
    document = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = CallGrammar(TOOL_FORMATS["hermes"], vocabulary(False)[0].token_to_id).source(
        SCHEMAS, 1, None, json.dumps(document)
    )
    for _ in range(40):
        text = walk(grammar, False, rng)
        if text is not None:
            answer = parsed("hermes", text)
            kinds.add(bool(answer.calls))
            if not answer.calls:
                jsonschema.validate(json.loads(answer.text), document)
    assert kinds == {True, False}


def test_after_reasoning_there_may_be_white_space() -> None:
    backend, tokenizer = vocabulary(False)
    grammar = CallGrammar(TOOL_FORMATS["hermes"], backend.token_to_id, after_thought=True).source(SCHEMAS, 1, None)
    for gap in ("", "\n\n"):
        matcher = LLMatcher(tokenizer, grammar)
        assert matcher.consume_tokens(backend.encode(f'{gap}<tool_call>\n{{"name": "now"').ids)
