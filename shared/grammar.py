"""The library that enforces grammars, behind one small face: a tokenizer for it, and matchers with limits.

The API process's compiler uses it to find out whether a grammar can be enforced, a worker's mask process to enforce it.
Knows llguidance; knows no request. Whoever calls it runs where a crash harms nobody: a matcher may take any time and
memory, because not everything that it does is under its limits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

_LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=20_000, verbose_errors=False)
"""What one grammar may take: fewer lexer states than the library's own limit, since they have up to 2 kB each, and more
items in a row, since an object has some for each property that may come next."""

WORD_BITS = 32


class GrammarError(ValueError):
    """A grammar that cannot be enforced, or not any further; the text says why, in the library's words."""


class Vocabulary:
    """The tokens of a model as bytes, which grammars are matched against."""

    def __init__(self, tokenizer_json: str, eos: Sequence[int] = ()) -> None:
        self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos) or None)
        self.words = -(-self._tokenizer.vocab_size // WORD_BITS)
        """Length of a mask."""
        self._eos = list(self._tokenizer.eos_tokens)

    def matcher(self, grammar: str) -> Matcher:
        """Raises GrammarError."""
        matcher = LLMatcher(self._tokenizer, grammar, limits=_LIMITS, log_level=0)
        _check(matcher)
        return Matcher(matcher, self._eos)

    def is_special(self, token: int) -> bool:
        """Whether a grammar must name the token itself, because its text does not stand for it."""
        return self._tokenizer.is_special_token(token)

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.tokenize_str(text, parse_special=True)


class Matcher:
    """Where one answer stands in its grammar. The end of the text is not a token of it."""

    def __init__(self, matcher: LLMatcher, eos: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos = eos

    def copy(self) -> Matcher:
        """One that goes on from here by itself."""
        return Matcher(self._matcher.deep_copy(), self._eos)

    def consume(self, token: int) -> None:
        """Raises GrammarError if the grammar has no place for it."""
        self._matcher.consume_token(token)
        _check(self._matcher)

    def forced(self, ends: Sequence[int]) -> list[int]:
        """The tokens that follow without a choice, as the tokenizer cuts their text; none of `ends` or behind it.

        Where the grammar allows one text only, other tokens could write it too: these are the ones that the model has
        read in its training. Raises GrammarError.
        """
        tokens: list[int] = self._matcher.compute_ff_tokens()
        _check(self._matcher)
        stops = [i for i, token in enumerate(tokens) if token in ends or token in self._eos]
        return tokens[: stops[0]] if stops else tokens

    def fill(self, mask: NDArray[np.int32], ends: Sequence[int]) -> None:
        """Sets the bits of the tokens that may follow; those of `ends` where the text may end. Raises GrammarError."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _check(self._matcher)
        may_end = has_bit(mask, self._eos[0])
        set_bits(mask, self._eos, False)
        if may_end:
            set_bits(mask, ends, True)
        if not mask.any():
            raise GrammarError("no token can follow: the grammar has no way on from here, nor an end")


def has_bit(mask: NDArray[np.int32], token: int) -> bool:
    return bool(mask[token // WORD_BITS] >> token % WORD_BITS & 1)


def set_bits(mask: NDArray[np.int32], tokens: Sequence[int], value: bool) -> None:
    """Tokens that the mask has no bit for are left out."""
    words = mask.view(np.uint32)
    for token in tokens:
        if 0 <= token < len(words) * WORD_BITS:
            bit = np.uint32(1 << token % WORD_BITS)
            words[token // WORD_BITS] = words[token // WORD_BITS] | bit if value else words[token // WORD_BITS] & ~bit


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
