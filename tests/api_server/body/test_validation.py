"""One sentence about one field, whatever pydantic found."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from api_server.body.validation import Mismatch, parse


class Inner(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    size: int | None = None


class Outer(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    inner: Inner | list[Inner] | None = None
    ids: list[int] | list[list[int]] | None = None
    one: Literal[1] | None = None
    scale: float | None = None
    texts: str | Annotated[list[str], Field(min_length=1)] | None = None


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
        ({"name": "a", "inner": {"size": 4.5}}, "inner.size", "valid integer, got 4.5"),
        ({"name": "a", "inner": {"size": 1e400}}, "inner.size", "got inf"),
        ({"name": "a", "inner": {"size": True}}, "inner.size", "valid integer, got True"),
        ({"name": "a", "ids": [1.0, 2.5]}, "ids[1]", "valid integer, got 2.5"),
        ({"name": "a", "one": 2.0}, "one", "should be 1"),
        ({"name": "a", "texts": []}, "texts", "at least 1 item"),
        ({"name": "a", "texts": 7}, "texts", "valid string"),
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


def test_a_whole_float_is_an_integer_where_one_is_wanted() -> None:
    """JSON has one kind of number, and clients in languages that have one, too, write 4 as 4.0."""
    body: dict[str, Any] = {"name": "a", "inner": [{"size": 1}, {"size": 4.0}], "ids": [[1.0, 2], [3.0]], "one": 1.0}
    parsed = parse(Outer, body | {"scale": 2.0})
    assert parsed.inner == [Inner(size=1), Inner(size=4)]
    assert (parsed.ids, parsed.one, parsed.scale) == ([[1, 2], [3]], 1, 2.0)
    assert isinstance(parsed.scale, float)
    assert parse(Outer, {"name": "a", "ids": [float(i) for i in range(1000)]}).ids == list(range(1000))
