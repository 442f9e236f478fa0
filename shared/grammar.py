"""The library that enforces grammars, behind one small interface: a tokenizer for it, and matchers with limits.

The API process's compiler uses it to find out whether a grammar can be enforced, a worker's mask process to enforce it.
Knows llguidance; knows no request. Call it only in a process that may crash: a matcher may take any time and memory,
because the limits do not cover all that it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

# Limits of one grammar: fewer lexer states than the library's own limit, since they have up to 2 kB each, and more
# items in a row, since an object has some for each property that may come next.
_LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=20_000, verbose_errors=False)

WORD_BITS = 32

# The library looks at no more tokens than these when it leaves off the end of a forced text, which the next may change.
_TOKENS_LEFT_OFF = 4
# Longest forced text, in bytes, whose reading is cached.
_TEXTS_KEPT = 4096
_LONGEST_KEPT = 256

_NO_FORCING = '%llguidance {"no_forcing": true}\n'


class GrammarError(ValueError):
    """A grammar that cannot be enforced, or not any further; the text gives the library's reason."""


class Reading(IntEnum):
    """A tokenizer's reading of a text."""

    SAME = auto()
    ANOTHER = auto()
    # So much longer that the library fails: what it may leave off at the end is more than all of the text.
    LONGER = auto()


class _Reader:
    """Classifies how forced texts are read, with a cache: most are short and come again with every object of a
    schema."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = lru_cache(_TEXTS_KEPT)(self._read)

    def read(self, text: bytes, before: int | None) -> Reading:
        """Return the reading of a text. The library reads it with the token before it, or by itself."""
        return self._known(text, before) if len(text) <= _LONGEST_KEPT else self._read(text, before)

    def _read(self, text: bytes, before: int | None) -> Reading:
        found = [self._reading(text)]
        if before is not None and not self._tokenizer.is_special_token(before):
            found.append(self._reading(self._tokenizer.decode_bytes([before]) + text))
        return max(found)

    def _reading(self, text: bytes) -> Reading:
        tokens = self._tokenizer.tokenize_bytes(text)
        if len(self._tokenizer.decode_bytes(tokens[-_TOKENS_LEFT_OFF:])) > len(text):
            return Reading.LONGER
        return Reading.SAME if self._tokenizer.decode_bytes(tokens) == text else Reading.ANOTHER


class Vocabulary:
    """The tokens of a model as bytes, which grammars are matched against."""

    def __init__(self, tokenizer_json: str, eos: Sequence[int] = ()) -> None:
        self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos) or None)
        self._reader = _Reader(self._tokenizer)
        # The length of a mask in words.
        self.words = -(-self._tokenizer.vocab_size // WORD_BITS)

    def matcher(self, grammar: str) -> Matcher:
        """Make a matcher at the start of a grammar. Raises GrammarError."""
        made = self._made(grammar)
        return Matcher(made, self._tokenizer, self._reader, lambda: self._made(_without_forcing(grammar)))

    def _made(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, limits=_LIMITS, log_level=0)
        _check(matcher)
        return matcher

    def is_special(self, token: int) -> bool:
        """Whether a grammar must name the token itself, because its text does not stand for it."""
        return self._tokenizer.is_special_token(token)

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.tokenize_str(text, parse_special=True)


class Matcher:
    """The position of one answer in its grammar. The end of the text is not a token of it.

    The library cuts text that a grammar forces with the model's tokenizer, which may rewrite it (NFC) or read the name
    of a control token in it. Such a cut is no use: where one comes, a second matcher that forces nothing says which
    tokens spell the text. It also does so where the library leaves off all tokens of a text that is rewritten: the
    library takes their length for that of the text, and its mask is of other tokens.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, reader: _Reader, unforced: Callable[[], LLMatcher]
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._reader = reader
        self._eos = list(tokenizer.eos_tokens)
        self._make_unforced = unforced
        self._unforced: LLMatcher | None = None
        self._consumed: list[int] = []
        self._unforced_consumed = 0
        self._cut: tuple[list[int], bool] | None = None

    def copy(self) -> Matcher:
        """Return an independent matcher at the same position."""
        copied = Matcher(self._matcher.deep_copy(), self._tokenizer, self._reader, self._make_unforced)
        copied._consumed = list(self._consumed)
        return copied

    def consume(self, token: int) -> None:
        """Advance by one token. Raises GrammarError if the grammar does not allow it."""
        self._cut = None
        self._matcher.consume_token(token)
        _check(self._matcher)
        self._consumed.append(token)

    def forced(self, ends: Sequence[int]) -> list[int]:
        """Return the jump-forward tokens, as the tokenizer cuts their text; none of `ends` or behind it.

        Where the grammar allows one text only, other tokens could write it too: these are the ones that the model has
        read in its training. Raises GrammarError.
        """
        tokens, _ = self._forced_tokens()
        stops = [i for i, token in enumerate(tokens) if token in ends or token in self._eos]
        return tokens[: stops[0]] if stops else tokens

    def fill(self, mask: NDArray[np.int32], ends: Sequence[int]) -> None:
        """Set the mask bits of the tokens that may follow, and of `ends` where the text may end. Raises
        GrammarError."""
        tokens, miscut = self._forced_tokens()
        matcher = self._caught_up() if miscut and not tokens else self._matcher
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _check(matcher)
        may_end = has_bit(mask, self._eos[0])
        set_bits(mask, self._eos, False)
        if may_end:
            set_bits(mask, ends, True)
        if not mask.any():
            raise GrammarError("no token can follow: the grammar has no way on from here, nor an end")

    def _forced_tokens(self) -> tuple[list[int], bool]:
        """Return the library's forced tokens as far as they spell the forced text, and whether some were left out."""
        if self._cut is None:
            text: bytes = self._matcher.compute_ff_bytes()
            _check(self._matcher)
            self._cut = self._cut_of(text) if text else ([], False)
        return self._cut

    def _cut_of(self, text: bytes) -> tuple[list[int], bool]:
        reading = self._reader.read(text, self._consumed[-1] if self._consumed else None)
        if reading is Reading.LONGER:
            return [], True
        tokens: list[int] = self._matcher.compute_ff_tokens()
        _check(self._matcher)
        if not tokens:
            return [], reading is Reading.ANOTHER
        spelling = self._spelling(tokens, text)
        return tokens[:spelling], spelling < len(tokens)

    def _spelling(self, tokens: Sequence[int], text: bytes) -> int:
        """Count the leading tokens that spell the beginning of the text."""
        at = 0
        for count, token in enumerate(tokens):
            # A grammar that means a special token, and not its name, has its number.
            special = self._tokenizer.is_special_token(token)
            spelled = b"\xff[%d]" % token if special else self._tokenizer.decode_bytes([token])
            if not text.startswith(spelled, at):
                return count
            at += len(spelled)
        return len(tokens)

    def _caught_up(self) -> LLMatcher:
        """Return the matcher that forces nothing, advanced to this one's position."""
        if self._unforced is None:
            self._unforced = self._make_unforced()
            self._unforced_consumed = 0
        self._unforced.consume_tokens(self._consumed[self._unforced_consumed :])
        self._unforced_consumed = len(self._consumed)
        _check(self._unforced)
        return self._unforced


def _without_forcing(grammar: str) -> str:
    """Add the option that forces no token to a grammar, in Lark or in the library's JSON."""
    if not grammar.lstrip().startswith("{"):
        return f"{_NO_FORCING}{grammar}"
    whole = json.loads(grammar)
    for part in whole["grammars"]:
        if part.get("lark_grammar") is not None:
            part["lark_grammar"] = f"{_NO_FORCING}{part['lark_grammar']}"
    return json.dumps(whole)


def has_bit(mask: NDArray[np.int32], token: int) -> bool:
    return bool(mask[token // WORD_BITS] >> token % WORD_BITS & 1)


def set_bits(mask: NDArray[np.int32], tokens: Sequence[int], value: bool) -> None:
    """Set the bits of `tokens`. Tokens beyond the mask are left out."""
    words = mask.view(np.uint32)
    for token in tokens:
        if 0 <= token < len(words) * WORD_BITS:
            bit = np.uint32(1 << token % WORD_BITS)
            words[token // WORD_BITS] = words[token // WORD_BITS] | bit if value else words[token // WORD_BITS] & ~bit


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
