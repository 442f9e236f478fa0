"""Texts are cut at the ends of sentences, and nothing of them is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_server.speech.sentences import SentenceReader, sentences
from tests.seeds import examples


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The train is late. It comes at nine!", ["The train is late. It comes at nine!"]),
        (
            "The train is late today. It comes at nine, I hope! Or does it not?",
            ["The train is late today.", "It comes at nine, I hope!", "Or does it not?"],
        ),
        ("Dr. Smith waits on platform 3.5 today.", ["Dr. Smith waits on platform 3.5 today."]),
        ('She said: "The train is late." Then she left us.', ['She said: "The train is late."', "Then she left us."]),
        ("The first line is a title\nThe second is a text", ["The first line is a title", "The second is a text"]),
        ("  \n ", []),
    ],
)
def test_a_text_is_cut_where_sentences_end(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_a_long_sentence_is_cut_at_a_comma_or_a_space() -> None:
    comma = f"{'word ' * 20}end, {'word ' * 30}end"
    assert sentences(comma, 120)[0] == f"{'word ' * 20}end,"
    assert {len(part) for part in sentences("word " * 100, 24)} <= {24, 19}
    assert sentences("a" * 25, 10) == ["a" * 10, "a" * 10, "a" * 5]


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(st.sampled_from("ab .,!?\n\"')…。"), max_size=300), most=st.integers(1, 60))
def test_every_character_is_spoken_once_and_no_part_is_too_long(text: str, most: int) -> None:
    parts = sentences(text, most)
    assert all(0 < len(part) <= most for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


@given(st.lists(st.sampled_from(["a", "word ", ". ", ".", "!", "。", "」", "\n", ", ", "x" * 90, " ", '"'])), st.data())
def test_a_text_in_pieces_is_cut_as_the_whole(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    reader = SentenceReader()
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += reader.add(text[begin:end])
    assert found + reader.end() == sentences(text)


def test_a_sentence_is_there_before_the_next_one_ends() -> None:
    reader = SentenceReader()
    assert reader.add("the first train leaves at nine.") == []
    assert reader.add(" the") == ["the first train leaves at nine."]
