"""At most one constraint comes out of the names under which a body may give one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.constraints.given import made, of_openai_body, of_tgi, one_of, response_format
from api_server.errors import RequestFailed
from interfaces import Constraint, ConstraintKind

NAMES = [("json_schema", ConstraintKind.JSON_SCHEMA), ("regex", ConstraintKind.REGEX), ("ebnf", ConstraintKind.EBNF)]
SCHEMA = {"type": "object", "properties": {"z": {}, "a": {}}}


@given(st.lists(st.one_of(st.none(), st.text(min_size=1).filter(str.strip)), min_size=3, max_size=3))
def test_one_value_is_taken_and_two_are_refused(values: list[str | None]) -> None:
    entries = [(name, kind, value) for (name, kind), value in zip(NAMES, values, strict=True)]
    present = [entry for entry in entries if entry[2] is not None]
    if len(present) > 1:
        with pytest.raises(RequestFailed, match=f"{present[0][0]} and {present[1][0]}.*exclude each other"):
            one_of(entries)
        return
    expected = [Constraint(kind, text or "", field=name) for name, kind, text in present]
    assert one_of(entries) == next(iter(expected), None)


def test_an_object_becomes_json_text_in_its_own_order() -> None:
    assert list(json.loads(made("x", ConstraintKind.JSON_SCHEMA, SCHEMA).source)["properties"]) == ["z", "a"]


def test_what_is_no_constraint_is_refused_by_name() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for kind, value, why in [
        (ConstraintKind.REGEX, " \n", "x must not be empty"),
        (ConstraintKind.REGEX, {"a": 1}, "x must be a text"),
        (ConstraintKind.JSON_SCHEMA, deep, "x is nested too deeply"),
    ]:
        with pytest.raises(RequestFailed, match=why):
            made("x", kind, value)


@pytest.mark.parametrize(
    ("body", "kind", "field"),
    [
        ({"response_format": {"type": "json_object"}}, ConstraintKind.JSON_SCHEMA, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            ConstraintKind.JSON_SCHEMA,
            "response_format",
        ),
        ({"response_format": {"type": "structural_tag"}}, ConstraintKind.STRUCTURAL_TAG, "response_format"),
        ({"guided_json": SCHEMA}, ConstraintKind.JSON_SCHEMA, "guided_json"),
        ({"guided_regex": "a"}, ConstraintKind.REGEX, "guided_regex"),
        ({"guided_choice": ["a", "b"]}, ConstraintKind.CHOICE, "guided_choice"),
        ({"guided_grammar": "root ::= x"}, ConstraintKind.EBNF, "guided_grammar"),
        ({"structured_outputs": {"regex": "a"}}, ConstraintKind.REGEX, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": True}}, ConstraintKind.JSON_SCHEMA, "structured_outputs.json_object"),
        ({"ebnf": "root ::= x"}, ConstraintKind.EBNF, "ebnf"),
    ],
)
def test_openai_bodies(body: dict[str, Any], kind: ConstraintKind, field: str) -> None:
    found = of_openai_body(body)
    assert found is not None
    assert (found.kind, found.field) == (kind, field)
    with pytest.raises(RequestFailed, match="exclude each other"):
        of_openai_body(
            body | ({"regex": "b"} if "response_format" in body else {"response_format": {"type": "json_object"}})
        )


def test_a_format_of_text_is_none() -> None:
    assert response_format({"type": "text"}) is None
    assert of_openai_body({"response_format": {"type": "text"}}) is None


JSON_FORM = Constraint(ConstraintKind.JSON_SCHEMA, made("x", ConstraintKind.JSON_SCHEMA, SCHEMA).source, field="f")
ANY_JSON = Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"object"}', field="f")
PATTERN = Constraint(ConstraintKind.REGEX, "[ab]+", field="f")
NAMED = {"name": "n", "schema": SCHEMA, "strict": False, "description": None}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "json_object"}, ANY_JSON),
        ({"type": "json_object", "value": None, "schema": None}, ANY_JSON),
        ({"type": "json_object", "schema": {}}, ANY_JSON),
        ({"type": "json_object", "value": SCHEMA}, JSON_FORM),
        ({"type": "json_object", "schema": SCHEMA, "value": None}, JSON_FORM),
        ({"type": "json", "value": SCHEMA}, JSON_FORM),
        ({"type": "json", "value": JSON_FORM.source}, JSON_FORM),
        ({"type": "json", "schema": SCHEMA}, JSON_FORM),
        ({"type": "json_schema", "value": NAMED}, JSON_FORM),
        ({"type": "json_schema", "json_schema": NAMED, "value": None}, JSON_FORM),
        ({"type": "json_schema", "json_schema": None, **NAMED}, JSON_FORM),
        ({"type": "regex", "value": "[ab]+"}, PATTERN),
        ({"type": "regex", "pattern": "[ab]+"}, PATTERN),
        ({"type": "text", "value": None}, None),
    ],
)
def test_a_form_is_found_wherever_its_clients_put_it(form: Any, expected: Constraint | None) -> None:
    assert response_format(form, "f") == expected


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ({"type": "text", "value": SCHEMA}, "f.value"),
        ({"type": "text", "schema": SCHEMA}, "f.schema"),
        ({"type": "json_object", "json_schema": NAMED}, "f.json_schema"),
        ({"type": "json_object", "pattern": "a"}, "f.pattern"),
        ({"type": "json_object", "grammar": "root ::= x"}, "f.grammar"),
        ({"type": "json_schema", "json_schema": NAMED, "regex": "a"}, "f.regex"),
        ({"type": "json_schema", "json_schema": NAMED, "value": NAMED}, "f.value"),
        ({"type": "json_schema", "json_schema": SCHEMA}, "f.json_schema.schema"),
        ({"type": "json_schema", "value": {"name": "n"}}, "f.value.schema"),
        ({"type": "json_schema"}, "f.json_schema"),
        ({"type": "json"}, "f.value"),
        ({"type": "json", "value": 1}, "f.value"),
        ({"type": "json_object", "schema": "x"}, "f.schema"),
        ({"type": "regex", "schema": SCHEMA}, "f.schema"),
        ({"type": "regex", "value": SCHEMA}, "f.value"),
        ({"type": "regex", "value": ""}, "f"),
        ({"type": "grammar", "grammar": "root ::= x"}, "f.type"),
    ],
)
def test_what_asks_for_a_form_and_is_not_enforced_is_refused_by_its_path(form: Any, path: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        response_format(form, "f")
    assert path in failed.value.message


def test_further_members_of_structured_outputs_are_not_ignored() -> None:
    harmless = {"regex": "a", "whitespace_pattern": None, "disable_any_whitespace": False}
    assert of_openai_body({"structured_outputs": harmless}) is not None
    with pytest.raises(RequestFailed, match=r"structured_outputs\.whitespace_pattern"):
        of_openai_body({"structured_outputs": harmless | {"whitespace_pattern": " "}})


def test_tgi_grammars() -> None:
    assert of_tgi(None) is None
    expected = made("grammar", ConstraintKind.JSON_SCHEMA, SCHEMA)
    assert of_tgi({"type": "json", "value": SCHEMA}) == expected
    assert of_tgi({"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}) == expected
    assert of_tgi({"type": "regex", "value": "a"}) == Constraint(ConstraintKind.REGEX, "a", field="grammar")
    wrongs: tuple[Any, ...] = (
        {},
        [],
        {"type": "json"},
        {"type": "json_schema", "value": {}},
        {"type": "x", "value": "a"},
    )
    for wrong in wrongs:
        with pytest.raises(RequestFailed, match="`grammar` must be"):
            of_tgi(wrong)
