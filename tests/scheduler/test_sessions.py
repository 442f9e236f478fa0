"""Sessions: what is remembered, what is forgotten, and the bounds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import scheduler.sessions
from interfaces import SessionAction, SessionAnswer, SessionMedium, SessionOrder, decode, encode
from scheduler.sessions import IDLE_SECONDS, MAX_SESSIONS, MAX_TOKENS, Sessions
from tests.scheduler.clock import Clock


def ask(sessions: Sessions, action: int, session: str = "s", **fields: Any) -> SessionAnswer:
    answer = sessions.obey(decode(encode(SessionOrder(7, action, session, **fields))), 3)
    assert (answer.number, answer.incarnation) == (7, 3)
    return answer


def remember(sessions: Sessions, request: str, tokens: list[int], parent: str = "") -> str:
    fields: dict[str, Any] = {"tokens": np.array(tokens, np.int32), "prompt_len": 1, "parent": parent}
    return ask(sessions, SessionAction.REMEMBER, request=request, **fields).refused


def recall(sessions: Sessions, request: str, replace: bool = False) -> list[int] | str:
    answer = ask(sessions, SessionAction.RECALL, request=request, replace=replace)
    return answer.refused or answer.tokens.tolist()


def test_a_turn_is_recalled_as_it_was() -> None:
    sessions = Sessions()
    assert ask(sessions, SessionAction.OPEN).refused == ""
    assert "open already" in ask(sessions, SessionAction.OPEN).refused
    tokens = [random.randrange(1000) for _ in range(9)]
    assert recall(sessions, "") == []
    assert "Invalid request session id" in str(recall(sessions, "a"))
    assert remember(sessions, "a", tokens) == ""
    assert recall(sessions, "a") == tokens
    assert ask(sessions, SessionAction.RECALL, request="a").prompt_len == 1
    assert ask(sessions, SessionAction.CLOSE).refused == ""
    for refused in (recall(sessions, "a"), remember(sessions, "b", [1]), ask(sessions, SessionAction.CLOSE).refused):
        assert "Invalid request session id" in str(refused)


def test_replace_forgets_what_went_on_from_there() -> None:
    sessions = Sessions()
    ask(sessions, SessionAction.OPEN)
    for name, parent in (("a", ""), ("b", "a"), ("c", "b"), ("d", "a"), ("e", "")):
        remember(sessions, name, [1], parent)
    assert recall(sessions, "b", replace=True) == [1]
    assert [isinstance(recall(sessions, name), list) for name in "abcde"] == [True, True, False, True, True]
    recall(sessions, "a", replace=True)
    assert [isinstance(recall(sessions, name), list) for name in "abcde"] == [True, False, False, False, True]
    recall(sessions, "", replace=True)
    assert not any(isinstance(recall(sessions, name), list) for name in "abcde")


def test_a_turn_that_is_its_own_parent_ends_no_process() -> None:
    sessions = Sessions()
    ask(sessions, SessionAction.OPEN)
    remember(sessions, "a", [1], "b")
    remember(sessions, "b", [1], "a")
    assert recall(sessions, "a", replace=True) == [1]


def test_a_long_chain_is_forgotten() -> None:
    sessions = Sessions()
    ask(sessions, SessionAction.OPEN)
    for i in range(3000):
        remember(sessions, str(i), [1], str(i - 1))
    assert recall(sessions, "0", replace=True) == [1]
    assert "Invalid request session id" in str(recall(sessions, "1"))
    assert "Invalid request session id" in str(recall(sessions, "2999"))


def test_unused_sessions_end() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    ask(sessions, SessionAction.OPEN, "short", timeout=10.0)
    ask(sessions, SessionAction.OPEN, "usual")
    clock.advance(9)
    ask(sessions, SessionAction.RECALL, "short")
    clock.advance(9)
    sessions.forget_idle()
    assert len(sessions) == 2
    clock.advance(2)
    sessions.forget_idle()
    assert len(sessions) == 1
    clock.advance(IDLE_SECONDS)
    sessions.forget_idle()
    assert len(sessions) == 0


def test_what_is_kept_is_bounded() -> None:
    sessions = Sessions()
    ask(sessions, SessionAction.OPEN)
    for i in range(5):
        remember(sessions, str(i), [i] * (MAX_TOKENS // 4))
    assert [isinstance(recall(sessions, str(i)), list) for i in range(5)] == [False, True, True, True, True]
    remember(sessions, "4", [4])
    assert recall(sessions, "4") == [4]
    remember(sessions, "5", [5] * (MAX_TOKENS + 1))
    assert len(recall(sessions, "5")) == MAX_TOKENS + 1, "the newest turn is kept"
    assert "Invalid request session id" in str(recall(sessions, "4"))
    for i in range(MAX_SESSIONS - 1):
        assert ask(sessions, SessionAction.OPEN, f"s{i}").refused == ""
    assert "close some" in ask(sessions, SessionAction.OPEN, "one more").refused


def picture(name: int, size: int = 1000) -> SessionMedium:
    return SessionMedium([bytes([name]) * size], False, False, "{}")


def test_images_are_kept_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.sessions, "MAX_MEDIA_BYTES", 2500)
    monkeypatch.setattr(scheduler.sessions, "MAX_MEDIA_BYTES_TOGETHER", 4000)
    clock = Clock()
    sessions = Sessions(clock)

    def keep(session: str, name: str, *pictures: int) -> None:
        clock.advance(1)
        fields: dict[str, Any] = {"tokens": np.ones(1, np.int32), "media": [picture(each) for each in pictures]}
        assert ask(sessions, SessionAction.REMEMBER, session, request=name, **fields).refused == ""

    def kept(session: str, name: str) -> list[SessionMedium] | None:
        answer = ask(sessions, SessionAction.RECALL, session, request=name)
        return None if answer.refused else answer.media

    for name in ("a", "b", "c"):
        ask(sessions, SessionAction.OPEN, name)
    keep("c", "0")
    keep("a", "1", 1)
    keep("a", "2", 1, 2)
    assert kept("a", "1") == [picture(1)]
    assert kept("a", "2") == [picture(1), picture(2)], "three images, of which two are one"
    keep("a", "3", 3)
    assert [kept("a", name) for name in "123"] == [None, None, [picture(3)]]
    keep("b", "1", 4, 5)
    assert kept("a", "3") == [picture(3)]
    keep("b", "2", 5, 6)
    assert kept("b", "2") == [picture(5), picture(6)]
    keep("c", "1", 7, 8)
    assert kept("a", "3") is None, "the session that was not used for the longest time is closed"
    assert kept("c", "1") == [picture(7), picture(8)]


def test_the_newest_turn_of_a_chain_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.sessions, "MAX_MEDIA_BYTES", 2500)
    sessions = Sessions()
    ask(sessions, SessionAction.OPEN)
    chain: list[SessionMedium] = []
    for name in range(4):
        # Each turn has the images of those before, and one of them twice.
        chain = [*chain, picture(name), picture(name)]
        fields: dict[str, Any] = {"tokens": np.ones(1, np.int32), "media": chain, "parent": str(name - 1)}
        ask(sessions, SessionAction.REMEMBER, request=str(name), **fields)
        assert ask(sessions, SessionAction.RECALL, request=str(name)).media == chain
        if name == 1:
            assert recall(sessions, "0") == [1], "equal images of one turn count once"
    assert "Invalid request session id" in str(recall(sessions, "2"))


def test_a_turn_names_the_images_of_the_one_before() -> None:
    sessions = Sessions()
    ask(sessions, SessionAction.OPEN)
    video = SessionMedium([b"v"], True, False, "{}")

    def keep(name: str, media: list[SessionMedium], parent: str = "", turn: int = 0) -> str:
        fields: dict[str, Any] = {"tokens": np.ones(1, np.int32), "media": media, "parent": parent}
        return ask(sessions, SessionAction.REMEMBER, request=name, parent_turn=turn, **fields).refused

    def recalled(name: str) -> SessionAnswer:
        return ask(sessions, SessionAction.RECALL, request=name)

    assert keep("a", [picture(1), picture(2), video]) == ""
    first = recalled("a").turn
    same_image = SessionMedium([], False, False, "{}")
    same_video = SessionMedium([], True, False, "{}")
    assert keep("b", [same_image, picture(3), same_video], "a", first) == ""
    assert recalled("b").media == [picture(1), picture(3), video]
    assert keep("c", [same_video, same_video], "a", first) == "the session 's' has the images of request 'a' no more"
    assert recalled("c").refused
    assert keep("a", [picture(4)]) == "", "another turn takes the name"
    assert "no more" in keep("c", [same_image], "a", first)
    assert "no more" in keep("c", [same_image], "gone", first)
    assert recalled("a").turn > first
