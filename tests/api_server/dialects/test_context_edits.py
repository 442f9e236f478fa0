"""`context_management`: what the edits take out of a conversation, and what clients are told."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from api_server.dialects.anthropic.context_edits import ContextManagement, Messages, edited
from api_server.errors import RequestFailed
from api_server.text.tokenizer import Tokenizer
from tests.api_server.conftest import LiveServer
from tests.api_server.dialects.test_anthropic import events_of, prompt_of
from tests.api_server.dialects.test_openai import post


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def use(number: int, name: str = "read", thought: str | None = None) -> list[dict[str, Any]]:
    thinking = [] if thought is None else [{"type": "thinking", "thinking": thought, "signature": ""}]
    call = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"page": number}}
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"result {number}"}
    return [{"role": "assistant", "content": [*thinking, call]}, {"role": "user", "content": [result]}]


def say(text: str, thought: str | None = None) -> dict[str, Any]:
    thinking = [] if thought is None else [{"type": "thinking", "thinking": thought, "signature": ""}]
    return {"role": "assistant", "content": [*thinking, {"type": "text", "text": text}]}


TALK = [ask("go"), *use(1), *use(2, "search"), *use(3), *use(4), *use(5), say("done"), ask("more")]


async def length(messages: Messages) -> int:
    """Stands for a tokenizer: longer conversations have more tokens."""
    return len(repr(messages))


async def managed(messages: Messages, *edits: dict[str, Any]) -> tuple[Messages, list[dict[str, Any]]]:
    management = ContextManagement.model_validate({"edits": list(edits)})
    found = await edited(messages, management, length)
    assert found.applied is not None
    return found.messages, found.applied


def results(messages: Messages) -> list[str]:
    blocks = [b for m in messages if isinstance(m["content"], list) for b in m["content"]]
    return [b["content"] for b in blocks if b["type"] == "tool_result"]


def uses(**more: Any) -> dict[str, Any]:
    return {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 0}, **more}


async def test_old_results_become_a_short_text() -> None:
    before = repr(TALK)
    left, applied = await managed(TALK, uses())
    assert [r.startswith("result") for r in results(left)] == [False, False, True, True, True]
    assert "removed" in results(left)[0]
    assert applied == [
        {
            "type": "clear_tool_uses_20250919",
            "cleared_tool_uses": 2,
            "cleared_input_tokens": max(0, len(repr(TALK)) - len(repr(left))),
        }
    ]
    assert repr(TALK) == before  # what the client sent is as it was


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"keep": {"type": "tool_uses", "value": 0}}, []),
        ({"keep": {"type": "tool_uses", "value": 1}}, [5]),
        ({"keep": {"type": "tool_uses", "value": 9}}, [1, 2, 3, 4, 5]),
        ({"keep": {"type": "tool_uses", "value": 1}, "exclude_tools": ["search"]}, [2, 5]),
        ({"exclude_tools": ["search", "read"]}, [1, 2, 3, 4, 5]),
        ({"trigger": {"type": "tool_uses", "value": 4}}, [3, 4, 5]),
        ({"trigger": {"type": "tool_uses", "value": 5}}, [1, 2, 3, 4, 5]),
        ({"trigger": {"type": "input_tokens", "value": 500}}, [3, 4, 5]),
        ({"trigger": {"type": "input_tokens", "value": 100_000}}, [1, 2, 3, 4, 5]),
        ({"trigger": None}, [1, 2, 3, 4, 5]),
        ({"clear_at_least": {"type": "input_tokens", "value": 10**6}}, [1, 2, 3, 4, 5]),
    ],
)
async def test_which_results_stay(more: dict[str, Any], kept: list[int]) -> None:
    left, applied = await managed(TALK, uses(**more))
    assert [r for r in results(left) if r.startswith("result")] == [f"result {i}" for i in kept]
    assert bool(applied) == (len(kept) < 5)


@pytest.mark.parametrize(
    ("inputs", "emptied"), [(None, []), (False, []), (True, [1, 2]), (["search"], [2]), (["other"], [])]
)
async def test_inputs_go_too_if_asked(inputs: Any, emptied: list[int]) -> None:
    left, _ = await managed(TALK, uses(clear_tool_inputs=inputs))
    calls = [b for m in left if isinstance(m["content"], list) for b in m["content"] if b["type"] == "tool_use"]
    assert [int(b["id"][1:]) for b in calls if b["input"] == {}] == emptied


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ("all", ["a", "b", "c", "d"]),
        ({"type": "all"}, ["a", "b", "c", "d"]),
        (None, ["d"]),
        ({"type": "thinking_turns", "value": 2}, ["b", "c", "d"]),
        ({"type": "thinking_turns", "value": 7}, ["a", "b", "c", "d"]),
    ],
)
async def test_thinking_of_old_turns_goes(keep: Any, left: list[str]) -> None:
    """A turn goes on through the results of its tools."""
    talk = [ask("1"), say("x", "a"), ask("2"), *use(1, thought="b"), say("y", "c"), ask("3"), say("z", "d"), ask("4")]
    found, applied = await managed(talk, {"type": "clear_thinking_20251015", "keep": keep})
    blocks = [b for m in found if isinstance(m["content"], list) for b in m["content"]]
    assert [b["thinking"] for b in blocks if b["type"] == "thinking"] == left
    assert [edit["cleared_thinking_turns"] for edit in applied] == ([] if len(left) == 4 else [3 - len(left) // 2 - 1])


async def test_a_message_of_thinking_alone_goes_as_a_whole() -> None:
    only = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    found, _ = await managed([ask("1"), only, ask("2"), say("z", "d")], {"type": "clear_thinking_20251015"})
    assert [m["role"] for m in found] == ["user", "user", "assistant"]


async def test_edits_follow_each_other() -> None:
    talk = [ask("go"), *use(1, thought="a"), *use(2), say("y", "b"), ask("more"), say("z", "c")]
    _, applied = await managed(talk, {"type": "clear_thinking_20251015"}, uses(keep={"type": "tool_uses", "value": 1}))
    assert [edit["type"] for edit in applied] == ["clear_thinking_20251015", "clear_tool_uses_20250919"]
    assert sum(edit["cleared_input_tokens"] for edit in applied) > 0


async def test_compaction_is_refused_only_when_it_would_act() -> None:
    assert await managed(TALK, {"type": "compact_20260112"}) == (TALK, [])
    with pytest.raises(RequestFailed) as refused:
        await managed(TALK, {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 5}})
    assert refused.value.field == "context_management.edits[0]"


def test_clients_are_told(live: LiveServer, tokenizer: Tokenizer) -> None:
    live.double.max_model_len = 2048
    live.double.wait(lambda: live.state.max_model_len == 2048)
    client = anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)
    given: Any = {"edits": [uses(keep={"type": "tool_uses", "value": 1})]}
    talk: Any = [ask("go"), *(m for i in range(4) for m in use(i)), say("done"), ask("more")]
    for message in talk:
        for block in message["content"] if isinstance(message["content"], list) else ():
            if block["type"] == "tool_result":
                block["content"] *= 30
    asked: dict[str, Any] = {"model": "", "messages": talk, "context_management": given}
    whole = client.beta.messages.create(**asked, max_tokens=50)
    prompt = prompt_of(live, tokenizer)
    assert ("result 2" in prompt, "result 3" in prompt) == (False, True)
    assert whole.context_management is not None
    (told,) = whole.context_management.applied_edits
    count = client.beta.messages.count_tokens(**asked)
    assert count.context_management is not None
    assert told.type == "clear_tool_uses_20250919"
    assert told.cleared_tool_uses == 3
    assert told.cleared_input_tokens == count.context_management.original_input_tokens - count.input_tokens > 0
    assert count.input_tokens == whole.usage.input_tokens
    events = events_of(post(live, "/v1/messages", asked | {"max_tokens": 50, "stream": True}).text)
    (delta,) = [event for event in events if event["type"] == "message_delta"]
    assert delta["context_management"] == {"applied_edits": [told.model_dump(exclude_unset=True)]}
    asking_for_nothing: list[Any] = [{"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, {}]
    for nothing in asking_for_nothing:
        answer = post(live, "/v1/messages?beta=true", asked | {"max_tokens": 5, "context_management": nothing})
        assert answer.json()["context_management"] == {"applied_edits": []}
    assert "context_management" not in post(live, "/v1/messages", {"messages": talk, "max_tokens": 5}).json()
