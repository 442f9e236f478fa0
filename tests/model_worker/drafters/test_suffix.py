"""The suffix automaton finds what a search of all texts finds, and the drafter keeps salts apart and memory bounded."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interfaces import Join, SamplingParams
from model_worker.drafters import suffix
from model_worker.drafters.suffix import EndedAnswers
from model_worker.drafters.suffix_automaton import ROOT, SuffixAutomaton

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=5)


def automaton_of(texts: list[list[int]]) -> SuffixAutomaton:
    made = SuffixAutomaton()
    for text in texts:
        for token in text:
            made.add(token)
        made.end_text()
    return made


def occurrences(texts: list[list[int]], stretch: list[int]) -> list[int | None]:
    """The token behind each place where a stretch is found; None: the text ends there."""
    size = len(stretch)
    return [
        text[at + size] if at + size < len(text) else None
        for text in texts
        for at in range(len(text) - size + 1)
        if text[at : at + size] == stretch
    ]


@given(TEXTS, st.lists(st.integers(0, 4), max_size=30))
def test_the_match_is_the_longest_end_that_has_come(texts: list[list[int]], text: list[int]) -> None:
    automaton = automaton_of(texts)
    state, length = ROOT, 0
    for i, token in enumerate(text):
        state, length = automaton.follow(state, length, token)
        ends = [text[start : i + 1] for start in range(i + 2)]
        longest = next(end for end in ends if not end or occurrences(texts, end))
        assert length == len(longest)


@given(TEXTS, st.data())
def test_the_likeliest_token_is_the_one_that_came_most_often(texts: list[list[int]], data: st.DataObject) -> None:
    automaton = automaton_of(texts)
    text = data.draw(st.sampled_from(texts))
    start = data.draw(st.integers(0, len(text) - 1))
    stretch = text[start : data.draw(st.integers(start + 1, len(text)))]
    state, length = ROOT, 0
    for token in stretch:
        state, length = automaton.follow(state, length, token)
    assert length == len(stretch)
    behind = Counter(token for token in occurrences(texts, stretch) if token is not None)
    tokens, shares = automaton.likely(state, 1)
    assert bool(tokens) == bool(behind)
    if tokens:
        assert behind[tokens[0]] == max(behind.values())
        assert shares[0] == pytest.approx(behind[tokens[0]] / len(occurrences(texts, stretch)))


@given(TEXTS, TEXTS, st.lists(st.integers(0, 3), max_size=20))
def test_a_state_from_before_more_was_added_leads_on(
    texts: list[list[int]], later: list[list[int]], text: list[int]
) -> None:
    automaton = automaton_of(texts)
    state, length = ROOT, 0
    for i, token in enumerate(text):
        if i == len(text) // 2:
            for more in later:
                for each in more:
                    automaton.add(each)
                automaton.end_text()
        state, length = automaton.follow(state, length, token)
        end = text[i + 1 - length : i + 1]
        assert not end or occurrences([*texts, *later], end)


def joined(drafter: EndedAnswers, row: int, salt: str = "") -> None:
    drafter.joined(Join(row, np.array([1], np.int32), 1, 0, SamplingParams(), salt=salt))


def end(drafter: EndedAnswers, row: int, answer: list[int], salt: str = "") -> None:
    joined(drafter, row, salt)
    drafter.left(row, np.array(answer, np.int32))
    while drafter._waiting:
        drafter.rest()


def guessed(drafter: EndedAnswers, row: int, text: list[int], most: int = 9) -> list[int]:
    found = drafter.propose({row: np.array(text, np.int32)}, {row: most})
    return found[row].tokens.tolist() if found else []


def test_what_followed_in_an_ended_answer_is_guessed_up_to_the_length_of_the_match() -> None:
    drafter = EndedAnswers()
    end(drafter, 0, [*range(100, 120)])
    joined(drafter, 3)
    assert guessed(drafter, 3, [7, 100]) == []
    assert guessed(drafter, 3, [7, 100, 101]) == [102, 103]
    assert guessed(drafter, 3, [7, 100, 101, 102, 103]) == [104, 105, 106, 107]
    assert guessed(drafter, 3, [7, 100, 101, 102, 103], most=1) == [104]
    assert guessed(drafter, 3, [7, 100, 101, 102, 103, 9]) == []
    assert guessed(drafter, 3, [*range(100, 119)], most=4) == [119]


def test_answers_of_one_salt_are_not_guessed_under_another() -> None:
    drafter = EndedAnswers()
    end(drafter, 0, [1, 2, 3, 4, 5], salt="a")
    joined(drafter, 0, "b")
    joined(drafter, 1, "a")
    assert guessed(drafter, 0, [1, 2, 3]) == []
    assert guessed(drafter, 1, [1, 2, 3]) == [4, 5]


def test_memory_is_bounded_and_the_newest_answers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "FULL", 400)
    monkeypatch.setattr(suffix, "MOST_TOKENS", 1500)
    drafter = EndedAnswers()
    rng = random.Random(1)
    for number in range(200):
        answer = [rng.randrange(10_000) for _ in range(50)]
        end(drafter, 0, answer, salt=f"tenant {number % 7}")
        assert drafter.size <= 1500 + 100
        joined(drafter, 1, f"tenant {number % 7}")
        assert guessed(drafter, 1, answer[:10], most=3) == answer[10:13]


def test_an_answer_that_finds_no_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MOST_WAITING", 20)
    drafter = EndedAnswers()
    for answer in ([*range(15)], [*range(50, 60)]):
        joined(drafter, 0)
        drafter.left(0, np.array(answer, np.int32))
    for _ in range(3):
        drafter.rest()
    joined(drafter, 0)
    assert guessed(drafter, 0, [3, 4]) == [5, 6]
    joined(drafter, 0)
    assert guessed(drafter, 0, [52, 53]) == []


def test_the_work_of_an_answer_does_not_grow_with_the_number_of_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may have a salt for each request."""
    monkeypatch.setattr(suffix, "FULL", 40)
    monkeypatch.setattr(suffix, "MOST_SALTS", 50)
    drafter = EndedAnswers()
    sizes: list[int] = []

    def size(answers: Any) -> int:
        sizes.append(answers.older.size + answers.younger.size)
        return sizes[-1]

    monkeypatch.setattr(suffix._Answers, "size", property(size))
    for number in range(200):
        end(drafter, 0, [number, number + 1, number + 2], salt=f"client {number}")
        end(drafter, 0, [*range(30)], salt="all")
    assert len(drafter._answers) == 50
    assert len(sizes) < 5 * 400
    assert drafter.size == sum(answers.size for answers in drafter._answers.values())
    assert guessed(drafter, 0, [199, 200]) == []
    joined(drafter, 0, "client 199")
    assert guessed(drafter, 0, [199, 200]) == [201]
