"""EOSTracker: by token, by sequence, by text however the text is cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces.context.stopping import EOSTracker
from interfaces.wire.codec import msgpack_numpy_decoder, msgpack_numpy_encoder

letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int64)


def pieces(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@settings(max_examples=300, deadline=None)
@given(letters, stops, st.lists(st.integers(0, 30), max_size=6), st.booleans())
def test_a_stop_string_is_found_in_the_piece_that_completes_it(
    text: str, strings: list[str], cuts: list[int], travels: bool
) -> None:
    tracker = EOSTracker(eos_stop_strings=strings)
    seen = ""
    for piece in pieces(text, cuts):
        seen += piece
        found = tracker.is_eos_from_string(piece)
        expected = any(stop in seen for stop in strings)
        assert (found is not None) == expected
        if found is not None:
            first = min(seen.find(stop) for stop in strings if stop in seen)
            assert found == max((s for s in strings if seen.startswith(s, first)), key=len)
            return
        if travels:
            tracker = msgpack_numpy_decoder(EOSTracker)(msgpack_numpy_encoder()(tracker))


@settings(max_examples=200, deadline=None)
@given(letters, stops, st.lists(st.integers(0, 30), max_size=6))
def test_no_match_is_reported_twice(text: str, strings: list[str], cuts: list[int]) -> None:
    tracker = EOSTracker(eos_stop_strings=strings)
    found = [tracker.is_eos_from_string(piece) for piece in [*pieces(text, cuts), *[""] * len(text)]]
    assert sum(len(stop) for stop in found if stop) <= len(text), "matches must not overlap"
    assert tracker.is_eos_from_string("") is None


def test_a_stop_string_early_in_a_long_piece_is_found() -> None:
    tracker = EOSTracker(eos_stop_strings=["END"])
    assert tracker.is_eos_from_string("xEND" + "y" * 1000) == "END"
    assert tracker.is_eos_from_string("") is None


def test_without_stop_strings_nothing_is_found() -> None:
    assert EOSTracker(eos_stop_strings=[""]).is_eos_from_string("text") is None


def test_the_last_token_or_sequence_ends() -> None:
    tracker = EOSTracker(eos_token_ids={7}, eos_sequences=[[1, 2], [3, 4, 5]])
    assert tracker.is_eos_from_tokens(ids(7))
    assert tracker.is_eos_from_tokens(ids(9, 1, 2))
    assert not tracker.is_eos_from_tokens(ids(7, 1))
    assert not tracker.is_eos_from_tokens(ids(5))
    with pytest.raises(ValueError, match="empty"):
        tracker.is_eos_from_tokens(ids())


@given(st.lists(st.integers(1, 4), max_size=5), st.lists(st.integers(1, 4), max_size=6))
def test_the_first_end_among_several_new_tokens(prior: list[int], new: list[int]) -> None:
    tracker = EOSTracker(eos_token_ids={4}, eos_sequences=[[1, 2, 3]])
    whole = [*prior, *new]
    ends = [i for i in range(len(new)) if tracker.is_eos_from_tokens(ids(*whole[: len(prior) + i + 1]))]
    assert tracker.first_eos_offset(ids(*prior), ids(*new)) == (ends[0] if ends else None)
