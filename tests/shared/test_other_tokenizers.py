"""Repositories without tokenizer.json: tokens are those of the library that owns the format."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken

from shared.tokenizer_files import load_tokenizer

SENTENCE = "the quick brown fox jumps over lazy dogs and then it sleeps under a tree while rain falls on the old roof"
WORDS = SENTENCE.split()
PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIALS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
# Ids before those of the file's own tokens.
FIRST = 10


def texts() -> list[str]:
    letters = "abcdeghiknorstu THEQ 0129 .,!?\n\t äß€語🙂"
    drawn = ["".join(random.choices(letters, k=random.randint(1, 60))) for _ in range(100)]
    return [" ".join(random.choices(WORDS, k=random.randint(1, 12))) for _ in range(100)] + drawn + WORDS


def sentencepiece_folder(path: Path, **settings: Any) -> sentencepiece.SentencePieceProcessor:
    corpus = path / "corpus.txt"
    corpus.write_text("\n".join(" ".join(random.choices(WORDS, k=9)) for _ in range(500)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(path / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **settings,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_sentencepiece_alone(kind: str, tmp_path: Path) -> None:
    judge = sentencepiece_folder(tmp_path, add_dummy_prefix=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
        )
    )
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    for text in texts():
        if text.startswith(" "):
            # transformers, whose conversion this is, lets a text's own space stand for the one that sentencepiece adds.
            continue
        want = judge.encode(text)
        assert tokenizer(text, add_special_tokens=False).input_ids == want, text
        assert tokenizer(text).input_ids == [judge.bos_id(), *want]
        assert tokenizer.decode(want) == judge.decode(want)


def tekken_folder(path: Path) -> tiktoken.Encoding:
    merged = ["th", "he", "the", " t", " the", "in", "an", "and", " a", " and", " q", "qu", " qu"]
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in merged]
    file = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + FIRST,
            "default_num_special_tokens": FIRST,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIALS)
        ],
    }
    (path / "tekken.json").write_text(json.dumps(file))
    (path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("tekken", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def test_tekken_alone(tmp_path: Path) -> None:
    judge = tekken_folder(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    begin = SPECIALS.index("<s>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (begin, SPECIALS.index("</s>"))
    assert (tokenizer.unk_token, tokenizer.pad_token) == ("<unk>", "<pad>")
    for text in texts():
        want = [FIRST + token for token in judge.encode(text)]
        assert tokenizer(text, add_special_tokens=False).input_ids == want, text
        assert tokenizer(text).input_ids == [begin, *want]
        assert tokenizer.decode(want) == text
