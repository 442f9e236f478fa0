"""What each language of constraints allows, and what is refused before anything is compiled."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_server.constraints.compile_process import readable
from shared.grammar import GrammarError
from tests.api_server.constraints.vocabulary import EOS, allows, compiled, loaded


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=5))
def test_a_choice_is_one_of_its_texts(texts: list[str]) -> None:
    grammar = compiled("choice", texts)
    _, special = loaded()
    for text in texts:
        if not any(name in text for name in special):
            assert allows(grammar, text)
        assert allows(grammar, text + "x") == (text + "x" in texts)


@pytest.mark.parametrize(
    "pattern",
    ["[a-z]+@[a-z]+(/[a-z]+)?", r"\d{2,4}-x", "(?i)yes|no", r"a\/b", "[^\n]*", "(a|ab)(c|bcd)?", "^start.*end$"],
)
def test_a_pattern_matches_the_whole_answer(pattern: str) -> None:
    grammar = compiled("regex", pattern)
    texts = [
        "a@b",
        "a@b/c",
        "12-x",
        "12345-x",
        "YES",
        "no",
        "a/b",
        "one\ntwo",
        "abcd",
        "acbcd",
        "start end",
        "startend!",
        "",
    ]
    for text in texts:
        assert allows(grammar, text) == (re.fullmatch(pattern, text) is not None), text


TAG = {"begin": '<f name="x">', "schema": {"type": "object", "properties": {"q": {"type": "integer"}}}, "end": "</f>"}
TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f", "["],
    "tags": [
        {"begin": "<f=a>", "content": {"type": "regex", "pattern": "[0-9]+/[0-9]"}, "end": "</f>"},
        {"begin": "<f=b>", "content": {"type": "any_text"}, "end": "</f>"},
        {"begin": "[c]", "content": {"type": "const_string", "value": "x"}, "end": ["!", "?"]},
    ],
}


JSON_TAG = {"type": "json_schema", "json_schema": {"type": "array"}}
SEQUENCE = [
    {"type": "const_string", "value": "A"},
    {
        "type": "optional",
        "content": {
            "type": "or",
            "elements": [
                {"type": "regex", "pattern": "\\d"},
                {"type": "grammar", "grammar": 'root ::= "(" root ")" | "-"'},
            ],
        },
    },
    {"type": "plus", "content": {"type": "const_string", "value": "z"}},
]
SEPARATED = {"begin": "<", "content": {"type": "regex", "pattern": "[ab]"}, "end": ">"}


@pytest.mark.parametrize(
    ("tag", "allowed", "forbidden"),
    [
        (
            {"structures": [TAG], "triggers": ["<f"]},
            ["free", "", 'so: <f name="x">{"q": 1}</f> and <f name="x">{}</f>.'],
            ["<f", '<f name="x">{"q": ""}</f>', '<f name="y">{}</f>', '<f name="x">{}'],
        ),
        (
            {"format": TRIGGERED},
            ["free", "a <f=a>12/3</f> b <f=b>what\never</f> c [c]x? d"],
            ["<f=a>12</f>", "<f=c></f>", "<f=b>", "[c]x", "[c]y!"],
        ),
        ({"format": TRIGGERED | {"at_least_one": True, "stop_after_first": True}}, ["a [c]x!"], ["a", "[c]x! more"]),
        (
            {"format": {"type": "tag", "begin": "<tool_call>\n", "content": JSON_TAG, "end": "\n</tool_call>"}},
            ["<tool_call>\n[1]\n</tool_call>"],
            ["<tool_call>\n{}\n</tool_call>", "[1]"],
        ),
        (
            {"format": {"type": "sequence", "elements": SEQUENCE}},
            ["Az", "A1zz", "A((-))z"],
            ["A", "A12z", "A((-)z"],
        ),
        (
            {"format": {"type": "tags_with_separator", "separator": ", ", "tags": [SEPARATED]}},
            ["", "<a>", "<a>, <b>"],
            ["<a><b>", "<a>, ", "<c>"],
        ),
    ],
)
def test_structural_tags(tag: dict[str, Any], allowed: list[str], forbidden: list[str]) -> None:
    grammar = compiled("structural_tag", tag)
    for text in allowed:
        assert allows(grammar, text), text
    for text in forbidden:
        assert not allows(grammar, text), text


def test_lark_with_schemas_in_it() -> None:
    schema = json.dumps({"type": "object", "properties": {"%json {": {"const": 1}}, "additionalProperties": False})
    grammar = compiled("lark", f'start: <tool_call> "x " %json {schema} " " %json {{"type": "integer"}} </tool_call>')
    assert allows(grammar, '<tool_call>x {"%json {": 1} 12</tool_call>')
    assert not allows(grammar, '<tool_call>x {"%json {": 2} 12</tool_call>')


def nested(levels: int) -> str:
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("json_schema", "{", "it is not JSON: .*line 1 column 2"),
        ("json_schema", "[]", "a JSON schema must be an object"),
        ("json_schema", nested(1000), "nested"),
        ("json_schema", "[" * 100_000, "nested too deeply"),
        ("json_schema", "x" * 600_000, "it has 600000 characters; at most 524288"),
        ("json_schema", '{"properties": {"a": {"multipleOf": 16777217}}}', "/properties/a/multipleOf must be between"),
        (
            "json_schema",
            '{"items": {"pattern": "a{99999}"}}',
            r"/items/pattern: the repetition \{99999\} at position 1",
        ),
        ("json_schema", '{"patternProperties": {"x\\\\": {}}}', "ends with a single backslash, at position 1"),
        ("json_schema", '{"type": "odd"}', "Invalid type: odd"),
        (
            "json_schema",
            '{"items": {"enum": [1, {"a": ["b\\u0012"]}]}}',
            r"/items/enum has the control character U\+0012",
        ),
        ("json_schema", '{"properties": {"a\\u007f": {}}}', r"/properties has the control character U\+007F"),
        ("json_schema", '{"$ref": "https://example.com/x"}', "https://example.com/x"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "no text can match"),
        ("json_schema", '{"enum": []}', "Unsatisfiable schema"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a{1000000000}", r"the repetition \{1000000000\} at position 1 is above 10000"),
        ("regex", "a" * 70_000, "it has 70000 characters; at most 65536"),
        ("choice", "[]", "it must be a list of texts"),
        ("choice", '["a", 1]', "it must be a list of texts"),
        ("structural_tag", "{}", "it must have format"),
        ("structural_tag", '{"format": {"type": "odd"}}', "format.type must be sequence"),
        ("structural_tag", '{"structures": [{"begin": "a"}], "triggers": ["a"]}', r"structures\[0\] must have schema"),
        ("lark", 'start: %json {"multipleOf": 1e9}', "/multipleOf must be between"),
        ("lark", "start: %json {", "%json at position 7"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(kind: str, source: str, why: str) -> None:
    with pytest.raises(GrammarError) as refused:
        compiled(kind, source)
    assert re.search(why, readable(str(refused.value))), readable(str(refused.value))


def test_options_of_the_matcher_are_not_the_clients() -> None:
    """One of them would have it ignore what it cannot do."""
    with pytest.raises(GrammarError, match="not"):
        compiled("json_schema", {"not": {"type": "null"}, "x-guidance": {"lenient": True}})


def test_a_declared_property_cannot_be_smuggled_in_by_an_escape() -> None:
    grammar = compiled("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}})
    assert not allows(grammar, '{"\\u0061": "x"}')
    assert allows(grammar, '{"b": "\\n\\""}')


def test_every_token_of_a_mask_is_taken() -> None:
    """The library's own promise; broken, a constrained answer would fail in the middle."""
    import numpy as np

    vocabulary, _ = loaded()
    grammar = compiled(
        "json_schema", {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}}
    )
    matcher, mask = vocabulary.matcher(grammar), np.zeros(vocabulary.words, np.int32)
    for _ in range(12):
        matcher.fill(mask, [EOS])
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        going_on = [token for token in allowed if token != EOS]
        if not going_on:
            assert allowed == [EOS], "a text that cannot go on has ended"
            break
        for token in random.sample(going_on, min(30, len(going_on))):
            matcher.copy().consume(token)
        matcher.consume(random.choice(going_on))
