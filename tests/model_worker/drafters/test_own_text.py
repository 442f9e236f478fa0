"""What is guessed to follow a text is what followed the place that is most like its end."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model_worker.drafters.own_text import LEAST_MATCH, draft


def alike(tokens: list[int], place: int, most: int) -> int:
    """How many tokens up to `place` are those at the end, counted one by one."""
    count = 0
    while count < min(most, place + 1) and tokens[place - count] == tokens[len(tokens) - 1 - count]:
        count += 1
    return count


def naive(tokens: list[int], most: int) -> list[int]:
    """The definition, place by place."""
    longest, best = 0, -1
    for place in range(len(tokens) - 1):
        count = alike(tokens, place, max(most, LEAST_MATCH))
        if count >= max(longest, LEAST_MATCH):
            longest, best = count, place
    if best < 0:
        return []
    wanted = min(longest, most)
    guessed: list[int] = []
    while len(guessed) < wanted:
        guessed.append([*tokens, *guessed][best + 1 + len(guessed)])
    return guessed


@given(
    st.integers(1, 4).flatmap(lambda most: st.lists(st.integers(0, most), min_size=1, max_size=60)), st.integers(1, 11)
)
def test_it_is_what_the_definition_says(tokens: list[int], most: int) -> None:
    assert draft(np.array(tokens, np.int32), most)[0].tolist() == naive(tokens, most)


def test_a_text_that_goes_round_goes_on_round() -> None:
    assert draft(np.array([9, 1, 2] + [5, 6] * 5, np.int32), 7)[0].tolist() == [5, 6, 5, 6, 5, 6, 5]


def test_two_tokens_that_came_before_are_not_enough() -> None:
    assert draft(np.array([1, 2, 3, 9, 2, 3], np.int32), 7)[0].tolist() == []
    tokens, alike = draft(np.array([1, 2, 3, 9, 1, 2, 3], np.int32), 7)
    assert (tokens.tolist(), alike) == ([9, 1, 2], 3)
