"""Matchers with tokenizers that rewrite text, and texts in which tokens are spelled out.

The judge is the library's own matcher, with forcing off.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from deploy import embedded_model
from shared.grammar import Matcher, Vocabulary

EOS, END_OF_TURN = 0, 2
ENDS = (EOS, END_OF_TURN)

AWKWARD = [
    "e\u0301", "A\u030a", "\u1112\u1161\u11ab", "\u2126", "\u212a", "\u212b", "\uf900", "\u0344", "ﬁ", "İ",
    "日本", "👩\u200d👧", "\u00e9", "a", "n", " ", "  ", ".", "<", ">", "|", "/", "end", "Z",
]  # fmt: skip
NORMALIZERS: dict[str, Any] = {
    "none": None,
    "NFC": {"type": "NFC"},
    "NFKC": {"type": "NFKC"},
    "NFD": {"type": "NFD"},
    "lowercase": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "NFC"}]},
}


@functools.cache
def tokenizer_json(normalizer: str) -> dict[str, Any]:
    text = (Path(embedded_model.__file__).parent / "weights" / "tokenizer.json").read_text()
    return {**json.loads(text), "normalizer": NORMALIZERS[normalizer]}


@functools.cache
def vocabulary(normalizer: str) -> Vocabulary:
    return Vocabulary(json.dumps(tokenizer_json(normalizer)), [EOS])


@functools.cache
def judge(normalizer: str) -> LLTokenizer:
    return LLTokenizer(json.dumps(tokenizer_json(normalizer)), eos_token=[EOS])


def names() -> list[str]:
    return [token["content"] for token in tokenizer_json("none")["added_tokens"]]


def written(name: str, grammar: str, seed: int) -> tuple[str, int]:
    """What a model that chooses at random writes, and how many of its tokens were forced."""
    tokenizer = judge(name)
    free = LLMatcher(tokenizer, f'%llguidance {{"no_forcing": true}}\n{grammar}', log_level=0)
    choice, matcher = random.Random(seed), vocabulary(name).matcher(grammar)
    tokens: list[int] = []
    forced = 0
    while True:
        run = matcher.forced(ENDS)
        forced += len(run)
        if not run:
            allowed = following(matcher, vocabulary(name).words)
            assert free.is_accepting() == (END_OF_TURN in allowed)
            assert all(free.validate_tokens([token]) == 1 for token in allowed if token not in ENDS)
            run = [choice.choice(allowed)]
        if run[0] in ENDS:
            return tokenizer.decode_bytes(tokens).decode(), forced
        for token in run:
            matcher.consume(token)
        assert free.consume_tokens(run), free.get_error()
        tokens += run
        assert not any(tokenizer.is_special_token(token) for token in run)


def following(matcher: Matcher, words: int) -> list[int]:
    mask = np.zeros(words, np.int32)
    matcher.fill(mask, ENDS)
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return found


TEXTS = st.lists(st.sampled_from([*AWKWARD, *names()]), min_size=1, max_size=8).map("".join)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS, other=TEXTS, seed=st.integers(0, 99))
@example(text="ﬁ", other="ﬁa", seed=0)  # the library leaves off all of a text of which NFKC has made a shorter one
def test_the_text_that_a_grammar_forces_is_what_is_written(normalizer: str, text: str, other: str, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": text}, other: {"enum": [other, text]}},
        "required": ["a", other],
        "additionalProperties": False,
    }
    found, _ = written(normalizer, f"start: %json {json.dumps(schema, ensure_ascii=False)}", seed)
    assert json.loads(found) == {"a": text, other: json.loads(found)[other]}
    found, _ = written(normalizer, f"start: {json.dumps(text)}", seed)
    assert found == text


def test_a_forced_text_is_cut_as_the_tokenizer_cuts_it() -> None:
    for normalizer in NORMALIZERS:
        text = "a plain text that leaves no choice, in lower case\n"
        tokens = vocabulary(normalizer).matcher(f"start: {json.dumps(text)}").forced(ENDS)
        assert tokens == vocabulary(normalizer).tokenize(text)


def test_tokens_are_forced_again_behind_a_text_that_is_rewritten() -> None:
    text = "Re\u0301sume\u0301, and then a plain text without any choice"
    found, forced = written("NFC", f"start: {json.dumps(text)}", seed=0)
    assert found == text
    assert forced >= len(vocabulary("NFC").tokenize("and then a plain text without any choice"))


def test_a_text_of_which_the_tokenizer_makes_a_longer_one_is_written_as_it_is() -> None:
    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("v", "i"), ("i", "i"), ("vi", "ii"), ("viii", "x")]
    tokens = [*alphabet, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    numeral = "\u2177"  # three bytes; NFKC makes four of them, which are one token, and with an x another one
    whole = tokenizer.to_str()
    matcher, text = Vocabulary(whole, [EOS]).matcher(f'start: "{numeral}" /x*/ "."'), b""
    while (run := matcher.forced(ENDS) or following(matcher, -(-len(tokens) // 32))[:1]) != [EOS]:
        for token in run:
            matcher.consume(token)
        text += LLTokenizer(whole).decode_bytes(run)
    assert text.decode() == f"{numeral}."


def test_a_copy_goes_on_from_where_it_was_made() -> None:
    text = "cafe\u0301 <|im_end|> x"
    matcher = vocabulary("NFC").matcher(f"start: {json.dumps(text)}")
    tokens: list[int] = []
    while not set(run := matcher.forced(ENDS) or following(matcher, vocabulary("NFC").words)[:1]) & set(ENDS):
        copy = matcher.copy()
        assert (copy.forced(ENDS) or following(copy, vocabulary("NFC").words)[:1]) == run
        matcher.consume(run[0])
        tokens.append(run[0])
    assert judge("NFC").decode_bytes(tokens).decode() == text


def test_a_special_token_that_the_grammar_names_is_itself() -> None:
    matcher = vocabulary("NFC").matcher('start: "<think>" <[4090]> "x<|im_end|>" <[2]>')
    tokens: list[int] = []
    while True:
        run = matcher.forced(ENDS) or following(matcher, vocabulary("NFC").words)[:1]
        if set(run) & set(ENDS):
            break
        for token in run:
            matcher.consume(token)
        tokens += run
    assert tokens.count(4090) == 1
    assert judge("NFC").decode_bytes(tokens).decode() == "<think><think>x<|im_end|>"


def test_a_pattern_in_the_librarys_own_form_is_read_without_forcing_too() -> None:
    matcher = vocabulary("NFC").matcher(LLMatcher.grammar_from_regex(r"<\|im_end\|>e\x{301}/"))
    text = b""
    while not set(run := matcher.forced(ENDS) or following(matcher, vocabulary("NFC").words)[:1]) & set(ENDS):
        for token in run:
            matcher.consume(token)
        text += judge("NFC").decode_bytes(run)
    assert text.decode() == "<|im_end|>e\u0301/"
