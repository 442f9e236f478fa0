"""Streams that are taken up again: whatever was read before, the rest follows, and nothing comes twice."""

from __future__ import annotations

import json
import secrets
from typing import Any

import httpx
import pytest

from interfaces.messages import Submit
from tests.api_server.conftest import LiveServer, encode, leave_when

HTTP = httpx.Client(timeout=90)
TEXT = "Hello, world! The quick brown fox jumps. 日本語 naïve"
CHAT = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 60}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": "x", "stream": True, "max_tokens": 60, "stop": ["fox"]},
    "/v1/messages": {"model": "tgi", "max_tokens": 60, "messages": CHAT["messages"], "stream": True},
    "/generate_stream": {"inputs": "x", "parameters": {"max_new_tokens": 60}},
    "/generate": {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 60}},
}
VOLATILE = ("id", "created", "e2e_latency", "queue_time", "time_info", "request_id")


@pytest.fixture
def spoken(live: LiveServer) -> LiveServer:
    eos = live.state.tokenizer.eos_token_ids[0]
    ids = encode(live.state.tokenizer, TEXT)
    live.double.answer = lambda _: [*ids, eos]
    return live


def events(live: LiveServer, path: str, body: dict[str, Any], name: str, last: str = "") -> list[tuple[str, str]]:
    """(id, data) of each event."""
    headers = {"x-resume-stream": "true", "x-request-id": name} | ({"last-event-id": last} if last else {})
    response = HTTP.post(live.url + path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in lines:
            found.append((lines.get("id", ""), _stable(lines["data"])))
    return found


def _stable(data: str) -> str:
    if data == "[DONE]":
        return data

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(each) for key, each in value.items() if key not in VOLATILE}
        return [clean(each) for each in value] if isinstance(value, list) else value

    return json.dumps(clean(json.loads(data)), sort_keys=True)


@pytest.mark.parametrize("path", BODIES)
def test_from_every_event_on_the_rest_follows(spoken: LiveServer, path: str) -> None:
    name = secrets.token_hex(8)
    whole = events(spoken, path, BODIES[path], name)
    ids = [event_id for event_id, _ in whole]
    assert len(set(ids)) == len(ids) > 8
    assert all(ids)
    for i in [*range(0, len(whole), 3), len(whole) - 1]:
        assert events(spoken, path, BODIES[path], name, ids[i]) == whole[i + 1 :], ids[i]


def test_several_answers_are_taken_up_together(spoken: LiveServer) -> None:
    body, name = CHAT | {"n": 3}, secrets.token_hex(8)
    whole = events(spoken, "/v1/chat/completions", body, name)
    for event_id, _ in whole[:: len(whole) // 7]:
        seen = whole[: [i for i, _ in whole].index(event_id) + 1]
        rest = events(spoken, "/v1/chat/completions", body, name, event_id)
        assert sorted(data for _, data in [*seen, *rest]) == sorted(data for _, data in whole)


def test_the_scheduler_is_told_the_name_and_that_nobody_listens(spoken: LiveServer) -> None:
    spoken.double.hold.set()
    headers = {"x-resume-stream": "true", "x-request-id": "mine"}
    leave_when(lambda: spoken.double.running, spoken, "/v1/chat/completions", CHAT, **headers)
    spoken.double.wait(lambda: spoken.double.detached)
    last: Submit = spoken.double.submits[-1]
    assert last.scheduling.resume == "mine#0"
    assert not spoken.double.cancelled


def test_the_seed_follows_from_the_name_unless_one_was_given(spoken: LiveServer) -> None:
    def seed(name: str, **body: Any) -> int:
        events(spoken, "/v1/chat/completions", CHAT | body, name)
        return spoken.double.submits[-1].text.sampling_params.seed

    assert seed("a") == seed("a") != seed("b")
    assert seed("a", seed=5) == 5


@pytest.mark.parametrize("last", ["x", "3", "1.2.3", "-1.0", "1-2:1.0", "1:x.0", "1." + "9" * 20])
def test_an_id_that_is_none_is_refused(spoken: LiveServer, last: str) -> None:
    headers = {"x-resume-stream": "true", "last-event-id": last}
    response = HTTP.post(spoken.url + "/v1/chat/completions", json=CHAT, headers=headers)
    assert response.status_code == 400
    assert "last-event-id" in response.text


def test_streams_have_no_ids_unless_asked_for(spoken: LiveServer) -> None:
    response = HTTP.post(spoken.url + "/v1/chat/completions", json=CHAT)
    assert "id: " not in response.text.replace('"id": ', "")
