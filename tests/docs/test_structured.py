"""docs/structured.md says of each keyword of JSON Schema whether it is supported, and that is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shared.grammar import GrammarError
from tests.api_server.constraints.vocabulary import allows, compiled

FORMATS = jsonschema.FormatChecker(["date", "date-time", "email", "ipv4", "ipv6", "uuid"])
"""Those of which the judge has the standard's idea; its times have no zone."""
PAGE = Path(__file__).parents[2] / "docs" / "structured.md"

Case = tuple[dict[str, Any], list[Any], list[Any]]
OBJECT = {"type": "object", "additionalProperties": False}
A = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}

SUPPORTED: dict[str, list[Case]] = {
    "type": [
        ({"type": "integer"}, [0, -5, 10**12], [1.5, "1", None]),
        ({"type": ["string", "null"]}, ["", "x", None], [1, []]),
        ({"type": "boolean"}, [True, False], [0, "true"]),
        ({"type": "number"}, [1, -2.5, 1e-7], ["1"]),
    ],
    "enum": [({"enum": ["a", 1, None, [1], {"k": "v"}]}, ["a", 1, None, [1], {"k": "v"}], ["b", 2, [2], {}])],
    "const": [({"const": {"a": [1, "ü"]}}, [{"a": [1, "ü"]}], [{"a": [1]}, "a"])],
    "properties": [({"type": "object", **A}, [{}, {"a": 1}, {"a": 1, "b": ""}, {"c": 0}], [{"a": ""}, {"b": 1}])],
    "required": [({**OBJECT, **A, "required": ["b"]}, [{"b": ""}, {"a": 1, "b": ""}], [{}, {"a": 1}])],
    "additionalProperties": [
        ({**OBJECT, **A}, [{"a": 1}], [{"c": 1}]),
        ({"type": "object", "additionalProperties": {"type": "null"}}, [{"x": None}], [{"x": 1}]),
    ],
    "patternProperties": [
        ({**OBJECT, "patternProperties": {"^n_": {"type": "integer"}}}, [{"n_x": 1}, {}], [{"n_x": ""}, {"m": 1}])
    ],
    "minProperties": [({"type": "object", "minProperties": 1}, [{"a": 1}, {"a": 1, "b": 2}], [{}])],
    "maxProperties": [({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}])],
    "items": [({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None]])],
    "prefixItems": [
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
            [[1], [1, "a"]],
            [["a"], [1, "a", 2]],
        )
    ],
    "minItems": [({"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]])],
    "maxItems": [({"type": "array", "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]])],
    "minLength": [({"type": "string", "minLength": 3}, ["abc", "日本語", 'a"\n'], ["", "ab", "é\\"])],
    "maxLength": [({"type": "string", "maxLength": 3}, ["", "abc", "日本語", '"\\\n'], ["abcd", "日本語だ"])],
    "pattern": [
        ({"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "ab"]),
        ({"type": "string", "pattern": "b"}, ["b", "abc"], ["ac"]),
    ],
    "format": [
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
        ({"type": "string", "format": "date-time"}, ["2024-01-01T10:00:00Z"], ["2024-01-01"]),
        ({"type": "string", "format": "time"}, ["10:00:00Z"], ["25:00:00Z"]),
        ({"type": "string", "format": "duration"}, ["P1DT2H"], ["1D"]),
        ({"type": "string", "format": "email"}, ["a@b.de"], ["a"]),
        ({"type": "string", "format": "hostname"}, ["a.b"], ["a b"]),
        ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1"]),
        ({"type": "string", "format": "ipv6"}, ["::1"], ["x"]),
        ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ({"type": "string", "format": "uri"}, ["http://a.b/c?d#e"], ["a b"]),
    ],
    "minimum": [({"type": "integer", "minimum": -3}, [-3, 0, 99], [-4, -100])],
    "maximum": [({"type": "number", "maximum": 10.5}, [10.5, -1000, 3], [10.6, 11])],
    "exclusiveMinimum": [({"type": "number", "exclusiveMinimum": 0}, [0.1, 5], [0, -1])],
    "exclusiveMaximum": [({"type": "integer", "exclusiveMaximum": 7}, [6, -7], [7, 8])],
    "multipleOf": [({"type": "integer", "multipleOf": 7}, [0, 7, 7777, -14], [1, 8])],
    "anyOf": [({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None])],
    "oneOf": [
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"k": {"const": k}, "v": {"type": kind}}, "required": ["k", "v"]}
                    for k, kind in (("i", "integer"), ("s", "string"))
                ]
            },
            [{"k": "i", "v": 1}, {"k": "s", "v": ""}],
            [{"k": "i", "v": ""}, {"k": "x", "v": 1}],
        ),
    ],
    "allOf": [
        (
            {
                "allOf": [
                    {"type": "object", **A, "required": ["a"]},
                    {"properties": {"c": {"const": 1}}, "required": ["c"]},
                ]
            },
            [{"a": 1, "c": 1}],
            [{"a": 1}, {"c": 1}, {"a": 1, "c": 2}],
        )
    ],
    "$ref": [
        (
            {
                "$defs": {"tree": {**OBJECT, "properties": {"l": {"$ref": "#/$defs/tree"}, "v": {"type": "integer"}}}},
                "$ref": "#/$defs/tree",
            },
            [{}, {"l": {"l": {"v": 1}}, "v": 2}],
            [{"l": 1}, {"l": {"x": 1}}],
        )
    ],
    "$defs": [({"$defs": {"x": {"type": "null"}}, "type": "array", "items": {"$ref": "#/$defs/x"}}, [[None]], [[1]])],
}
REFUSED: dict[str, dict[str, Any]] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "minContains": {"type": "array", "contains": {}, "minContains": 2},
    "maxContains": {"type": "array", "contains": {}, "maxContains": 2},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
}


def test_the_page_names_these_keywords() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (supported|refused) \|", PAGE.read_text(), re.MULTILINE)
    assert {name for name, state in rows if state == "supported"} == set(SUPPORTED)
    assert {name for name, state in rows if state == "refused"} == set(REFUSED)


@pytest.mark.parametrize("keyword", SUPPORTED)
def test_a_supported_keyword_is_enforced(keyword: str) -> None:
    for schema, valid, invalid in SUPPORTED[keyword]:
        judge = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        grammar = compiled("json_schema", schema)
        for instance in valid:
            assert judge.is_valid(instance), (schema, instance)
            for separators, indent in (((",", ":"), None), ((", ", ": "), None), (None, 2)):
                text = json.dumps(instance, ensure_ascii=False, separators=separators, indent=indent)
                assert allows(grammar, text), (schema, text)
        for instance in invalid:
            assert not allows(grammar, json.dumps(instance, ensure_ascii=False)), (schema, instance)


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_refused_keyword_is_refused_by_name(keyword: str) -> None:
    for schema in (REFUSED[keyword], {"type": "object", "properties": {"deep": REFUSED[keyword]}}):
        with pytest.raises(GrammarError, match=re.escape(keyword.removeprefix("$"))):
            compiled("json_schema", schema)


def test_the_page_is_right_about_limits() -> None:
    from api_server.constraints import compile_process, limits
    from model_worker.grammar import mask_process

    text = PAGE.read_text()
    for number in (
        limits.MOST_SOURCE,
        limits.MOST_PATTERN,
        limits.MOST_REPEATS,
        limits.MOST_MULTIPLE,
        limits.MOST_LEVELS,
    ):
        assert f"{number:,}" in text or str(number) in text
    assert f"{compile_process.CPU_SECONDS:g} s of processor time and {compile_process.MEMORY_BYTES >> 30} GB" in text
    assert f"than {mask_process.CPU_SECONDS:g} s for one token" in text
