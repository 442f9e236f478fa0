"""Stop strings: the same cut for every chunking, equal to a plain search over the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.text.stop_strings import StopStrings

# Few letters, so that stop strings, their beginnings and overlaps are frequent.
TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """By definition: the first end of a match wins, at one end the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if keep else text[: end - len(stop)]), stop
    return text, None


def streamed(pieces: list[str], stops: list[str], keep: bool) -> tuple[list[str], str | None]:
    state = StopStrings(stops, keep)
    out = []
    for piece in pieces:
        out.append(state.add(piece))
        if state.matched is not None:
            return out, state.matched
    return [*out, state.flush()], None


@given(TEXT, STOPS, st.booleans(), st.data())
def test_any_chunking_gives_the_text_of_a_search_over_the_whole(
    text: str, stops: list[str], keep: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    out, matched = streamed(pieces, stops, keep)
    assert ("".join(out), matched) == expected(text, stops, keep)


@given(TEXT, STOPS)
def test_nothing_is_held_back_that_cannot_begin_a_stop_string(text: str, stops: list[str]) -> None:
    state = StopStrings(stops)
    out = ""
    for character in text:
        out += state.add(character)
        if state.matched is not None:
            return
    held = text[len(out) :]
    assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "keep", "text", "matched"),
    [
        (["one\n", "\nUs", "er:", " two"], ["\n\nUser:"], False, "one", "\n\nUser:"),
        (["one\n", "\nUs", "er:", " two"], ["\n\nUser:"], True, "one\n\nUser:", "\n\nUser:"),
        (["one\n", "\nUs", "age"], ["\n\nUser:"], False, "one\n\nUsage", None),
        (["xab"], ["b", "ab"], False, "x", "ab"),
        (["", "a"], [""], False, "a", None),
        (["日本", "語。", "x"], ["語。"], False, "日本", "語。"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], keep: bool, text: str, matched: str | None) -> None:
    out, found = streamed(pieces, stops, keep)
    assert ("".join(out), found) == (text, matched)
