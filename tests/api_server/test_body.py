"""One sentence about one field, whatever pydantic found."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from api_server.body import Mismatch, parse


class Inner(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    size: int | None = None


class Outer(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    inner: Inner | list[Inner] | None = None
    ids: list[int] | list[list[int]] | None = None


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ({}, "name", "missing field `name`"),
        ({"name": 3}, "name", "valid string, got 3"),
        ({"name": "a", "inner": {"size": "x"}}, "inner.size", "valid integer, got 'x'"),
        ({"name": "a", "inner": [{"size": 1}, {"size": "x"}]}, "inner[1].size", "valid integer, got 'x'"),
        ({"name": "a", "inner": {"sise": 1}}, "inner.sise", "not permitted"),
        ({"name": "a", "ids": [[1], ["x"]]}, "ids[1][0]", "got 'x'"),
        ({"name": "a" * 500, "ids": "b" * 500}, "ids", "..."),
        ([], "", "valid dictionary"),
    ],
)
def test_the_field_is_named(value: Any, field: str, words: str) -> None:
    with pytest.raises(Mismatch) as caught:
        parse(Outer, value)
    assert caught.value.field == field
    assert words in str(caught.value)
    assert len(str(caught.value)) < 250


def test_what_fits_is_returned() -> None:
    assert parse(Outer, {"name": "a", "inner": {"size": 3}}).inner == Inner(size=3)
