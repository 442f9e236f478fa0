"""Stop patterns over text in pieces: where they match, that time stays linear, and the answers of the server."""

from __future__ import annotations

import random
import re
import time

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api_server.text.stop_patterns import WINDOW, StopPatterns, compiled
from tests.api_server.conftest import LiveServer, encode

_pieces = st.lists(st.text("ab1 \né日", max_size=3), max_size=12)


@example(pieces=["日\n"], pattern=r"日é?$")
@given(pieces=_pieces, pattern=st.sampled_from([r"a+b", r"\d\s", r"^b", r"日é?$", r"(a|b){3}", r"\n\n", r"a\b"]))
def test_the_first_token_after_which_it_matches_ends_the_text(pieces: list[str], pattern: str) -> None:
    # Python's $ matches before a last line break, too; RE2's only at the end.
    patterns, same = StopPatterns([pattern]), pattern.replace("$", r"\Z")
    text = ""
    for piece in pieces:
        text += piece
        patterns.add(piece)
        assert (patterns.matched is not None) == bool(piece and re.search(same, text, re.ASCII)), (text, pattern)
        if patterns.matched is not None:
            break


def test_the_beginning_of_the_text_is_not_that_of_the_window() -> None:
    patterns = StopPatterns(["^ab"])
    for _ in range(WINDOW + 5):
        patterns.add("x")
    for _ in range(WINDOW):
        patterns.add("ab")
        assert patterns.matched is None


def test_of_several_the_first_in_the_list_is_named() -> None:
    patterns = StopPatterns(["z", r"\d", "a1"])
    patterns.add("a1")
    assert patterns.matched == r"\d"


@pytest.mark.parametrize("pattern", [r"(a+)+$b", r"(x+x+)+y", r"(a|a)*b", r"(.*a){20}"])
def test_a_pattern_that_backtracking_would_not_finish_takes_no_time(pattern: str) -> None:
    patterns = StopPatterns([pattern])
    start = time.process_time()
    for _ in range(2000):
        patterns.add(random.choice(["ax", "xx", "aax"]))
    assert time.process_time() - start < 20


@pytest.mark.parametrize("pattern", ["(?=a)", r"(a)\1", "[", r"\w{1000}\w{1000}", "(((a{30}){30}){30})"])
def test_what_is_no_pattern_is_named(pattern: str) -> None:
    with pytest.raises(ValueError) as refused:
        compiled(["a", pattern])
    assert repr(pattern) in str(refused.value)


def test_the_answer_ends_with_the_match(live: LiveServer) -> None:
    tokenizer = live.state.tokenizer
    ids = encode(tokenizer, "one two 33 four")
    live.double.answer = lambda _: ids
    for stream in (False, True):
        sampling = {"stop_regex": [r"zz", r"\d+"], "max_new_tokens": 100}
        body = {"text": "x", "sampling_params": sampling, "stream": stream}
        response = httpx.post(live.url + "/generate", json=body)
        line = response.text.strip().split("\n\n")[-2].removeprefix("data: ") if stream else response.text
        answer = httpx.Response(200, text=line).json()
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"\d+"}
        assert answer["text"] == tokenizer._backend.decode(answer["output_ids"])
        assert re.fullmatch(r"one two \d+", answer["text"])
    live.double.wait(lambda: not live.double.running)
