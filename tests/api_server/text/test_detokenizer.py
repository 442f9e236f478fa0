"""Incremental text equals the text decoded at once, and no piece has a broken character."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from api_server.text.detokenizer import Vocabulary
from tests.api_server.conftest import byte_level_backend, metaspace_backend

# Any character but surrogates (no text has them) and the replacement character itself, which marks what is broken.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="�"), max_size=40)

BYTE_LEVEL = Vocabulary(byte_level_backend())
METASPACE = Vocabulary(metaspace_backend())
VOCABULARIES = {"byte_level": BYTE_LEVEL, "metaspace": METASPACE}


def pieces_of(vocabulary: Vocabulary, ids: list[int], context: list[int], skip: bool = True) -> list[str]:
    state = vocabulary.detokenizer(context, skip)
    return [*(state.add(token) for token in ids), state.flush()]


def id_of(backend: Backend, token: str) -> int:
    found = backend.token_to_id(token)
    assert found is not None
    return found


def shuffled_bytes(backend: Backend, text: str, data: st.DataObject) -> list[int]:
    """Ids of `text` in a random split: some words as the tokenizer has them, others byte by byte."""
    ids: list[int] = []
    for token in backend.encode(text, add_special_tokens=False).tokens:
        ids += [id_of(backend, part) for part in (token if data.draw(st.booleans()) else [token])]
    return ids


@given(TEXT, st.data())
def test_byte_level_any_split_of_any_text(text: str, data: st.DataObject) -> None:
    ids = shuffled_bytes(BYTE_LEVEL.backend, text, data)
    pieces = pieces_of(BYTE_LEVEL, ids, [])
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@given(TEXT, TEXT)
def test_metaspace_continues_a_prompt_as_decoding_both_does(prompt: str, text: str) -> None:
    backend = METASPACE.backend
    context = backend.encode(prompt).ids
    ids = backend.encode(text).ids
    pieces = pieces_of(METASPACE, ids, context)
    whole = backend.decode([*context, *ids])
    assert backend.decode(context) + "".join(pieces) == whole
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("name", VOCABULARIES)
@given(st.lists(st.integers(0, 255), max_size=30), st.data())
def test_bytes_that_are_no_text_end_and_lose_no_text_after_them(name: str, raw: list[int], data: st.DataObject) -> None:
    vocabulary = VOCABULARIES[name]
    backend = vocabulary.backend
    if name == "byte_level":
        alphabet = {value[0]: i for i in range(backend.get_vocab_size()) if len(value := vocabulary.bytes_of(i)) == 1}
        ids = [alphabet[byte] for byte in raw]
    else:
        ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in raw]
    tail = backend.encode("the fox").ids
    text = "".join(pieces_of(vocabulary, [*ids, *tail], []))
    assert text.endswith("the fox")
    if name == "byte_level":
        assert text == backend.decode([*ids, *tail])


@given(st.lists(st.integers(0, BYTE_LEVEL.backend.get_vocab_size() - 1), max_size=60), st.booleans())
def test_byte_level_random_tokens_equal_decoding_at_once(ids: list[int], skip: bool) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, ids, [], skip)) == BYTE_LEVEL.backend.decode(ids, skip_special_tokens=skip)


def test_special_tokens_within_an_answer_do_not_eat_the_space_after_them() -> None:
    backend = METASPACE.backend
    ids = [*backend.encode("the").ids, backend.token_to_id("</s>"), *backend.encode("fox").ids]
    assert "".join(pieces_of(METASPACE, ids, backend.encode("a").ids)) == " the fox"


def test_an_added_token_that_is_not_special_is_text() -> None:
    token = BYTE_LEVEL.backend.token_to_id("<tool call>")
    assert pieces_of(BYTE_LEVEL, [token], [])[0] == "<tool call>"


def test_an_id_outside_the_vocabulary_is_no_text() -> None:
    for vocabulary in VOCABULARIES.values():
        assert "".join(pieces_of(vocabulary, [10**6], [])) == ""


def test_endless_garbage_does_not_pile_up() -> None:
    continuation = METASPACE.backend.token_to_id("<0x80>")
    state = METASPACE.detokenizer([], True)
    shown = sum(len(state.add(continuation)) for _ in range(200 + random.randrange(20)))
    assert shown > 150
