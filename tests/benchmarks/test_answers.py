"""What the check of a real model's answers takes for the form that was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.answers import QUESTIONS, _holds, _joined

CHAT, TOOL, JSON = QUESTIONS


def call(name: str | None, arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"name": name, "arguments": arguments}}]}


def test_deltas_are_joined() -> None:
    assert (
        _joined([{"role": "assistant"}, {"content": "A "}, {"content": None}, {"content": "fox"}])["content"] == "A fox"
    )
    joined = _joined([call("get_weather", '{"ci'), call(None, 'ty": "Paris"}')])
    assert joined["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert _holds(TOOL, joined)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (CHAT, {"content": " "}),
        (TOOL, {"content": "It rains."}),
        (TOOL, call("get_weather", '{"city"')),
        (TOOL, call("get_time", '{"city": "Paris"}')),
        (JSON, {"content": "a person"}),
        (JSON, {"content": '{"name": "A", "age": "3"}'}),
        (JSON, {}),
    ],
)
def test_answers_of_another_form_do_not_hold(question: Any, message: dict[str, Any]) -> None:
    assert not _holds(question, message)


def test_answers_of_the_form_hold() -> None:
    assert _holds(CHAT, {"content": "A fox is an animal."})
    assert _holds(JSON, {"content": '{"name": "A", "age": 3}'})
