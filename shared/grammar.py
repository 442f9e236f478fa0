"""The library that enforces grammars, behind one small face: a tokenizer for it, and matchers with limits.

The API process's compiler uses it to find out whether a grammar can be enforced, a worker's mask process to enforce it.
Knows llguidance; knows no request. Whoever calls it runs where a crash harms nobody: a matcher may take any time and
memory, because not everything that it does is under its limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

_LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=20_000, verbose_errors=False)
"""What one grammar may take: fewer lexer states than the library's own limit, since they have up to 2 kB each, and more
items in a row, since an object has some for each property that may come next."""

WORD_BITS = 32

_NO_FORCING = '%llguidance {"no_forcing": true}\n'


class GrammarError(ValueError):
    """A grammar that cannot be enforced, or not any further; the text says why, in the library's words."""


class Vocabulary:
    """The tokens of a model as bytes, which grammars are matched against."""

    def __init__(self, tokenizer_json: str, eos: Sequence[int] = ()) -> None:
        self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos) or None)
        self.words = -(-self._tokenizer.vocab_size // WORD_BITS)
        """Length of a mask."""

    def matcher(self, grammar: str) -> Matcher:
        """Raises GrammarError."""
        made = self._made(grammar)
        return Matcher(made, self._tokenizer, lambda: self._made(_without_forcing(grammar)))

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
    """Where one answer stands in its grammar. The end of the text is not a token of it.

    The library cuts text that a grammar forces with the model's tokenizer, which may rewrite it (NFC) or read the name
    of a control token in it. Such a cut is no use: where one comes, a second matcher that forces nothing says which
    tokens spell the text.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, unforced: Callable[[], LLMatcher]) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._eos = list(tokenizer.eos_tokens)
        self._make_unforced = unforced
        self._unforced: LLMatcher | None = None
        self._consumed: list[int] = []
        self._unforced_consumed = 0
        self._cut: tuple[list[int], bool] | None = None

    def copy(self) -> Matcher:
        """One that goes on from here by itself."""
        copied = Matcher(self._matcher.deep_copy(), self._tokenizer, self._make_unforced)
        copied._consumed = list(self._consumed)
        return copied

    def consume(self, token: int) -> None:
        """Raises GrammarError if the grammar has no place for it."""
        self._cut = None
        self._matcher.consume_token(token)
        _check(self._matcher)
        self._consumed.append(token)

    def forced(self, ends: Sequence[int]) -> list[int]:
        """The tokens that follow without a choice, as the tokenizer cuts their text; none of `ends` or behind it.

        Where the grammar allows one text only, other tokens could write it too: these are the ones that the model has
        read in its training. Raises GrammarError.
        """
        tokens, _ = self._forced_tokens()
        stops = [i for i, token in enumerate(tokens) if token in ends or token in self._eos]
        return tokens[: stops[0]] if stops else tokens

    def fill(self, mask: NDArray[np.int32], ends: Sequence[int]) -> None:
        """Sets the bits of the tokens that may follow; those of `ends` where the text may end. Raises GrammarError."""
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
        """The library's forced tokens as far as they spell what is forced, and whether that was not all of them."""
        if self._cut is None:
            tokens: list[int] = self._matcher.compute_ff_tokens()
            text: bytes = self._matcher.compute_ff_bytes() if tokens else b""
            _check(self._matcher)
            spelling = self._spelling(tokens, text)
            self._cut = tokens[:spelling], spelling < len(tokens)
        return self._cut

    def _spelling(self, tokens: Sequence[int], text: bytes) -> int:
        """How many of the tokens, from the first on, spell the beginning of the text."""
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
        """The matcher that forces nothing, at the place of this one."""
        if self._unforced is None:
            self._unforced, self._unforced_consumed = self._make_unforced(), 0
        self._unforced.consume_tokens(self._consumed[self._unforced_consumed :])
        self._unforced_consumed = len(self._consumed)
        _check(self._unforced)
        return self._unforced


def _without_forcing(grammar: str) -> str:
    """The same grammar, in Lark or in the library's JSON, with its option that forces no token."""
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
    """Tokens that the mask has no bit for are left out."""
    words = mask.view(np.uint32)
    for token in tokens:
        if 0 <= token < len(words) * WORD_BITS:
            bit = np.uint32(1 << token % WORD_BITS)
            words[token // WORD_BITS] = words[token // WORD_BITS] | bit if value else words[token // WORD_BITS] & ~bit


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
