"""At most one constraint comes out of the names under which a body may give one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interfaces import Constraint, ConstraintKind

NAMES = [("json_schema", ConstraintKind.JSON_SCHEMA), ("regex", ConstraintKind.REGEX), ("ebnf", ConstraintKind.EBNF)]


@given(st.lists(st.one_of(st.none(), st.text(min_size=1).filter(str.strip)), min_size=3, max_size=3))
def test_one_value_is_taken_and_two_are_refused(values: list[str | None]) -> None:
    entries = [(name, kind, value) for (name, kind), value in zip(NAMES, values, strict=True)]
    present = [entry for entry in entries if entry[2] is not None]
    if len(present) > 1:
        with pytest.raises(ValueError, match=f"{present[0][0]} and {present[1][0]}.*exclude each other"):
            Constraint.one_of(entries)
        return
    made = Constraint.one_of(entries)
    if not present:
        assert made is None
        return
    name, kind, text = present[0]
    assert made == Constraint(kind, text or "", field=name)


def test_an_object_becomes_json_text_in_its_own_order() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    made = Constraint.one_of([("json_schema", ConstraintKind.JSON_SCHEMA, schema)])
    assert made is not None
    assert list(json.loads(made.source)["properties"]) == ["z", "a"]


@pytest.mark.parametrize("empty", ["", " \n"])
def test_an_empty_text_is_refused_by_name(empty: str) -> None:
    with pytest.raises(ValueError, match="regex must not be empty"):
        Constraint.one_of([("regex", ConstraintKind.REGEX, empty)])


def test_an_object_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="json_schema is nested too deeply"):
        Constraint.one_of([("json_schema", ConstraintKind.JSON_SCHEMA, deep)])
