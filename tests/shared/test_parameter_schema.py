"""Schemas of parameters: what they allow is what jsonschema says, and what is not supported is refused."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.parameter_schema import check_schema, problem

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 2.0, -1.5])
    | st.sampled_from(["", "a", "ab"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=6,
)
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])
LEAVES = st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "minimum": st.integers(-2, 2),
        "maximum": st.integers(-2, 2),
        "exclusiveMinimum": st.integers(-2, 2),
        "exclusiveMaximum": st.integers(-2, 2),
        "minItems": st.integers(0, 2),
        "maxItems": st.integers(0, 2),
        "minLength": st.integers(0, 2),
        "maxLength": st.integers(0, 2),
        "required": st.lists(st.sampled_from("xyz"), max_size=2, unique=True),
        "description": st.just("words"),
    },
)
SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda leaf, parts: leaf | parts,
        LEAVES,
        st.fixed_dictionaries(
            {},
            optional={
                "properties": st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
                "additionalProperties": st.booleans() | inner,
                "items": inner,
                "anyOf": st.lists(inner, min_size=1, max_size=2),
            },
        ),
    ),
    max_leaves=5,
)


@given(SCHEMAS, VALUES)
def test_verdicts_are_jsonschemas(schema: dict[str, Any], value: Any) -> None:
    valid = jsonschema.Draft202012Validator(schema).is_valid(value)
    found = problem(schema, value, "value")
    assert (found is None) == valid, found
    if found is not None:
        assert found.startswith("value")


@pytest.mark.slow
@given(SCHEMAS)
def test_supported_schemas_are_accepted(schema: dict[str, Any]) -> None:
    check_schema(schema | {"type": "object"})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ([], "schema must be an object"),
        ({"type": "string"}, "schema.type must be"),
        ({"type": "object", "properties": {"x": {"pattern": "a*"}}}, "schema.properties.x.pattern is not supported"),
        ({"type": "object", "properties": {"x": {"$ref": "#/y"}}}, "is not supported"),
        ({"type": "object", "properties": []}, "schema.properties must be an object"),
        ({"type": "object", "required": "x"}, "schema.required must be a list of names"),
        ({"type": "object", "properties": {"x": {"minimum": "1"}}}, "minimum must be a number"),
        ({"type": "object", "properties": {"x": {"maxItems": 1.5}}}, "maxItems must be a whole number"),
        ({"type": "object", "properties": {"x": {"type": "int"}}}, "schema.properties.x.type must be one of"),
        ({"type": "object", "additionalProperties": {"anyOf": []}}, "additionalProperties.anyOf must be a list"),
    ],
)
def test_what_cannot_be_checked_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        check_schema(schema)


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"x": schema}
    with pytest.raises(ValueError, match="deep"):
        check_schema(schema)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value: float) -> None:
    assert problem({"type": "number"}, value, "x") == f"x must be a finite number, got {value}"


def test_long_values_are_cut_in_errors() -> None:
    found = problem({"type": "integer"}, "a" * 10_000, "x")
    assert found is not None
    assert len(found) < 200
