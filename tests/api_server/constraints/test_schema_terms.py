"""Terms that ask for nothing, numbers that the matcher cannot hold, and schemas made looser."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api_server.constraints.schema_terms import enforceable, loosened, shallow
from shared.grammar import GrammarError
from tests.api_server.constraints.vocabulary import allows, compiled
from tests.seeds import examples

TEXT = {"type": "string"}
OBJECT = {"type": "object"}
ARRAY = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    "idle",
    [
        {**OBJECT, "propertyNames": {"type": "string"}, "additionalProperties": TEXT},
        {**OBJECT, "propertyNames": True},
        {**OBJECT, "propertyNames": {"type": ["string", "null"], "title": "a name"}},
        {**OBJECT, "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {"a": []}},
        {**OBJECT, "unevaluatedProperties": True},
        {**ARRAY, "uniqueItems": False},
        {**ARRAY, "minContains": 1, "maxContains": 2},
        {**ARRAY, "contains": {"type": "null"}, "minContains": 0},
        {**ARRAY, "unevaluatedItems": {}},
        {**TEXT, "not": False},
        {**TEXT, "not": {"not": {}}},
        {**TEXT, "if": {"minLength": 1}},
        {**TEXT, "if": {"minLength": 1}, "then": {}, "else": True},
        {**TEXT, "then": {"minLength": 1}},
        *(
            {**TEXT, "format": name}
            for name in (
                "path",
                "password",
                "binary",
                "json-string",
                "ipv4network",
                "uri-reference",
                "regex",
                "cuid",
                "jwt",
            )
        ),
        {**TEXT, "format": "starts_with", "pattern": "^ab"},
        {"type": "integer", "format": "int64"},
    ],
)
def test_what_restricts_nothing_changes_nothing_and_is_listed(idle: dict[str, Any]) -> None:
    terms = {"type", "items", "additionalProperties", "pattern"}
    plain = {name: part for name, part in idle.items() if name in terms}
    deep = {**OBJECT, "properties": {"x": {"anyOf": [idle, {"type": "null"}]}}, "required": ["x"]}
    found, ignored = enforceable(idle)
    assert found == plain
    assert {place.split()[0] for place in ignored} == {f"/{name}" for name in idle if name not in terms}
    assert all(place.startswith("/properties/x/anyOf/0/") for place in enforceable(deep)[1])
    compiled("json_schema", deep)


def test_what_never_fits_is_a_schema_that_takes_nothing() -> None:
    optional = {**OBJECT, "properties": {"a": {"not": {}}, "b": TEXT}, "additionalProperties": False}
    grammar = compiled("json_schema", optional)
    assert allows(grammar, '{"b": "x"}')
    assert not allows(grammar, '{"a": "x"}')
    branch = compiled("json_schema", {"anyOf": [TEXT, {"not": True, "title": "never"}]})
    assert allows(branch, '"x"')
    assert not allows(branch, "1")
    with pytest.raises(GrammarError, match="no text"):
        compiled("json_schema", {"not": {}})


def test_names_and_values_that_read_like_keywords_are_none() -> None:
    schema = {**OBJECT, "properties": {"not": {"enum": [{"uniqueItems": False, "format": "x"}]}, "if": TEXT}}
    assert enforceable(schema) == (schema, [])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({**ARRAY, "uniqueItems": True}, "the schema has uniqueItems"),
        ({**OBJECT, "properties": {"a": {"not": TEXT}}}, "/properties/a has not"),
        ({"anyOf": [TEXT, {**OBJECT, "propertyNames": {"pattern": "^x"}}]}, "/anyOf/1 has propertyNames"),
        ({"if": TEXT, "then": {"minLength": 2}}, "the schema has if, then"),
        ({**ARRAY, "contains": TEXT, "minContains": 2}, "the schema has contains, minContains"),
    ],
)
def test_what_cannot_be_enforced_is_named_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(GrammarError, match=place):
        enforceable(schema)
    assert enforceable(loosened(schema))[1] == []
    compiled("json_schema", loosened(schema))


SCHEMAS = st.sampled_from(
    [
        {**ARRAY, "uniqueItems": True},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {**OBJECT, "properties": {"a": {"not": TEXT}, "b": TEXT}, "required": ["a"], "dependentRequired": {"b": ["a"]}},
        {**TEXT, "if": {"maxLength": 1}, "then": {"pattern": "x"}},
        {**OBJECT, "propertyNames": {"maxLength": 1}, "additionalProperties": {"enum": [1, 2**60 + 1]}},
    ]
)
VALUES = st.sampled_from(
    [[1, 1], [1, 2], 1, 1.5, {"a": 1}, {"a": "x", "b": "y"}, {"b": "x"}, "x", "yy", {}, {"k": 1}, {"k": 2**60 + 1}]
)


@given(SCHEMAS, VALUES)
def test_a_loosened_schema_takes_whatever_the_schema_takes(schema: Any, value: Any) -> None:
    if jsonschema.Draft202012Validator(schema).is_valid(value):
        for looser in (loosened(schema), shallow(schema) if isinstance(value, dict) else {}):
            assert jsonschema.Draft202012Validator(looser).is_valid(value)


EDGES = [2**53, 2**62, 2**63, 2**64, 10**18, 10**19, 0, 1000]
NUMBERS = st.builds(
    lambda edge, step, sign: sign * (edge + step),
    st.sampled_from(EDGES),
    st.integers(-1500, 1500),
    st.sampled_from([1, -1]),
)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@example(10**18 - 1, 10**18 - 1, [], False, "integer")
@example(2**53, 10**18 - 101, [10**18 - 100], False, "number")
@example(2**53, 2**63 - 809, [], False, "number")
@given(NUMBERS, NUMBERS, st.lists(NUMBERS, max_size=4), st.booleans(), st.sampled_from(["integer", "number"]))
def test_no_number_outside_of_its_bounds_is_ever_allowed(
    a: int, b: int, tried: list[int], exclusive: bool, kind: str
) -> None:
    lowest, highest = min(a, b), max(a, b)
    names = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
    for bounds in ({names[0]: lowest, names[1]: highest}, {names[0]: lowest}, {names[1]: highest}):
        try:
            grammar = compiled("json_schema", {"type": kind, **bounds})
        except GrammarError as refused:
            if any(word in str(refused) for word in ("64 bits", "no number", "Unsatisfiable")):
                continue
            raise
        judge = jsonschema.Draft202012Validator({"type": kind, **bounds})
        for number in (*tried, *(edge + step for edge in (lowest, highest) for step in (-1025, -1, 0, 1, 1025))):
            if allows(grammar, str(number)):
                assert judge.is_valid(number), (bounds, number)
            elif abs(number) < 2**53:
                assert not judge.is_valid(number), (bounds, number)


@pytest.mark.parametrize(
    ("lowest", "highest"), [(-(2**63), 2**63 - 1), (0, 2**64 - 1), (-3.4028234663852886e38, 3.4028234663852886e38)]
)
def test_the_ranges_of_common_types_are_taken(lowest: float, highest: float) -> None:
    for kind in ("integer", "number"):
        grammar = compiled("json_schema", {"type": kind, "minimum": lowest, "maximum": highest})
        assert all(allows(grammar, str(number)) for number in (0, 1, 2**53 + 1, 10**18 + 1, 9223372036854770000))
    grammar = compiled("json_schema", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    assert allows(grammar, str(2**63 - 1))
    assert not allows(grammar, str(2**63))


@settings(max_examples=100, deadline=None)
@example(1113178120592002.2)
@given(NUMBERS | st.floats(allow_nan=False, allow_infinity=False))
def test_a_constant_number_is_exact_or_refused(number: float) -> None:
    try:
        grammar = compiled("json_schema", {"type": "array", "items": {"enum": [number, "x"]}, "minItems": 1})
    except GrammarError as refused:
        if "/items/enum has the number" in str(refused) and (not 1e-22 < abs(number) < 2**53 or len(repr(number)) > 15):
            return
        raise
    assert any(
        allows(grammar, f"[{text}]") for text in (json.dumps(number), f"{Decimal(repr(number)):f}", f"{number:.0f}")
    )


def test_a_wrong_number_within_a_constant_is_named() -> None:
    for value in ({"a": [2**53 + 1]}, [[9007199254740993]], 224.25672220619774):
        with pytest.raises(GrammarError, match="/const has the number"):
            compiled("json_schema", {"const": value})
