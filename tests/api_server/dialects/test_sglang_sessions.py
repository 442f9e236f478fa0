"""SGLang's sessions over HTTP: the scheduler double keeps turns as the scheduler does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api_server.conftest import LiveServer, encode


def post(live: LiveServer, path: str, body: Any) -> httpx.Response:
    return httpx.post(live.url + path, json=body, timeout=90)


def turn(live: LiveServer, text: str, name: str, **params: Any) -> dict[str, Any]:
    body = {"text": text, "rid": name, "session_params": {"id": "s"} | params, "sampling_params": {"max_new_tokens": 3}}
    response = post(live, "/generate", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["meta_info"]["id"] == name
    return answer


def prompts(live: LiveServer) -> list[list[int]]:
    return [submit.text.tokens.prompt.tolist() for submit in live.double.submits]


@pytest.fixture
def session(live: LiveServer) -> LiveServer:
    response = post(live, "/open_session", {"capacity_of_str_len": 1000, "session_id": "s"})
    assert (response.status_code, response.json()) == (200, "s")
    return live


def test_a_request_goes_on_from_another(session: LiveServer) -> None:
    ids = [encode(session.state.tokenizer, text) for text in ("Hello", " there", "x")]
    first = turn(session, "Hello", "a")
    second = turn(session, " there", "b", rid="a")
    turn(session, "x", "c", rid="b", drop_previous_output=True)
    turn(session, "x", "d", rid="b", offset=2)
    turn(session, "x", "e")
    one = ids[0] + first["output_ids"] + ids[1]
    assert prompts(session) == [ids[0], one, one + ids[2], one[:2] + ids[2], ids[2]]
    assert second["meta_info"]["prompt_tokens"] == len(one)


def test_streams_are_remembered_too(session: LiveServer) -> None:
    body = {"text": "Hello", "rid": "a", "session_params": {"id": "s"}, "stream": True}
    assert post(session, "/generate", body).text.endswith("data: [DONE]\n\n")
    turn(session, "x", "b", rid="a")
    tokenizer = session.state.tokenizer
    whole = [*encode(tokenizer, "Hello"), *encode(tokenizer, "Hello, world!"), tokenizer.eos_token_ids[0]]
    assert prompts(session)[1] == whole + encode(tokenizer, "x")


def test_an_answer_that_a_stop_string_ended_is_kept_up_to_there(session: LiveServer) -> None:
    body = {"text": "Hello", "rid": "a", "session_params": {"id": "s"}, "sampling_params": {"stop": ","}}
    answer = post(session, "/generate", body).json()
    turn(session, "x", "b", rid="a")
    tokenizer = session.state.tokenizer
    assert prompts(session)[1] == encode(tokenizer, "Hello") + answer["output_ids"] + encode(tokenizer, "x")


def test_replace_forgets_the_branch(session: LiveServer) -> None:
    turn(session, "a", "a")
    turn(session, "b", "b", rid="a")
    turn(session, "c", "c", rid="a", replace=True)
    body = {"text": "x", "session_params": {"id": "s", "rid": "b"}}
    response = post(session, "/generate", body)
    assert response.status_code == 400
    assert "Invalid request session id" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", {"text": "x", "session_params": {"id": "no"}}, "Invalid request session id"),
        ("/generate", {"text": "x", "session_params": {"id": "s", "rid": "no"}}, "Invalid request session id"),
        ("/generate", {"text": ["x", "y"], "session_params": {"id": "s"}}, "one prompt"),
        ("/generate", {"text": "x", "session_params": {"id": "s"}, "sampling_params": {"n": 2}}, "one prompt"),
        ("/generate", {"text": "x", "session_params": {"id": "s", "offset": -1}}, "offset"),
        ("/generate", {"text": "x", "session_params": {}}, "id"),
        ("/generate", {"text": "x", "session_params": {"id": "s"}, "session_id": "t"}, "cannot both be set"),
        ("/open_session", {"capacity_of_str_len": 1, "session_id": "s"}, "open already"),
        ("/open_session", {"capacity_of_str_len": 1, "timeout": 0}, "timeout"),
        ("/open_session", {"capacity_of_str_len": 1, "streaming": True}, "streaming"),
        ("/open_session", {}, "capacity_of_str_len"),
        ("/close_session", {"session_id": "no"}, "Invalid request session id"),
        ("/close_session", {}, "session_id"),
    ],
)
def test_what_sessions_refuse(session: LiveServer, path: str, body: dict[str, Any], words: str) -> None:
    response = post(session, path, body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert not session.double.submits


def test_a_closed_session_is_gone(session: LiveServer) -> None:
    fresh = post(session, "/open_session", {"capacity_of_str_len": 5}).json()
    assert len(fresh) == 32
    response = post(session, "/close_session", {"session_id": fresh})
    assert (response.status_code, response.content) == (200, b"")
    assert post(session, "/generate", {"text": "x", "session_params": {"id": fresh}}).status_code == 400
