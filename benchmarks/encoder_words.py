"""The standard encoders' shapes and vocabulary: each word is one token, so a text's words decide its length."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

VOCABULARY = 30522
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Tokens that the tokenizer puts around a text.
AROUND = 2
LONGEST = 512
ENCODERS: Mapping[str, Mapping[str, int]] = {
    "encoder-22m": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "encoder-tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    },
}
LETTERS = string.ascii_lowercase
WORD_LETTERS = 4


def words(tokens: Sequence[int]) -> str:
    """Return the text that these ids of words are, without the two tokens around it."""
    return " ".join(_word(token - len(SPECIAL)) for token in tokens)


def _word(number: int) -> str:
    letters = []
    for _ in range(WORD_LETTERS):
        number, letter = divmod(number, len(LETTERS))
        letters.append(LETTERS[letter])
    return "".join(reversed(letters))
