"""What a value asks for decides, at every depth of a body."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from api_server.body import unknown_fields
from api_server.body.unknown_fields import ALWAYS, Refusals, check, unless
from api_server.errors import RequestFailed


class Inner(BaseModel):
    model_config = ConfigDict(extra="ignore")

    depth: int | None = None


class Outer(BaseModel):
    model_config = ConfigDict(extra="ignore")

    inner: Inner | None = None
    items: list[Inner] | dict[str, Any] | None = None
    free: dict[str, Any] | None = None


REFUSED: Refusals = {
    "speed": ("haste", unless(None, "normal")),
    "inner.budget": ("a budget", ALWAYS),
    "items.count": ("counting", unless(0)),
    "odd": ("odd numbers", lambda value: isinstance(value, int) and value % 2 == 1),
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown_fields, "_reported", set())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"speed": "fast"}, "speed"),
        ({"inner": {"budget": {}}}, "inner.budget"),
        ({"items": [{"count": 0}, {"count": 2}]}, "items[1].count"),
        ({"items": [{"count": True}]}, "items[0].count"),
        ({"odd": 3}, "odd"),
    ],
)
def test_what_asks_is_refused_by_its_path(body: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestFailed) as refused:
        check(body, Outer, REFUSED)
    assert refused.value.field == field
    assert refused.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    "body",
    [
        {"speed": None}, {"speed": "normal"}, {"inner": {"budget": None, "depth": 5}}, {"items": [{"count": 0}]},
        {"odd": 4}, {"inner": 5, "items": ["x", None]}, {"free": {"budget": 1, "speed": "fast"}},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_passes(body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    check(body, Outer, REFUSED)
    assert not caplog.records


def test_unknown_names_are_logged_once_by_their_path(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        check({"inner": {"width": 1}, "items": [{"hue": 1}, {"hue": 2}], "known": 1}, Outer, REFUSED, {"known"})
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == 2
    assert ["'inner.width'" in found[0], "'items.hue'" in found[1]] == [True, True]


def test_reports_do_not_grow_without_end(caplog: pytest.LogCaptureFixture) -> None:
    check({f"name{i}": 1 for i in range(500)}, Outer, {})
    assert len(caplog.records) == 100
