"""Tokenizes the texts and pairs of one-shot requests, many at once, and cuts those that are longer than they may be.

A text that is cut is tokenized only as far as it is kept. Knows a tokenizer's backend; knows no dialect and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.text.tokenizer import refuse_long

# Characters of a long text that are tokenized at first, for each token that is kept.
_CHARACTERS_PER_TOKEN = 6
# Tokens at the cut that are not trusted: the text beyond it might have changed them.
_UNSURE_TOKENS = 32
# Texts longer than this are tokenized apart from the others, as far as they are kept.
_SHORTEST_LONG = 256

_WHITESPACE = " \n\t"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The most tokens of a text, special tokens included, and what happens to a longer one."""

    limit: int
    truncate: bool = False
    # Truncation keeps the end of a text instead of its beginning.
    keep_end: bool = False
    add_special_tokens: bool = True
    # The field that has the texts, for errors.
    field: str = "input"
    # How a client asks for truncation, for errors.
    remedy: str = ""
    # Index of the first text within the request, for errors.
    first: int = 0
    # True when the field is a list: errors name the index.
    listed: bool = True

    def where(self, index: int) -> str:
        return f"{self.field}[{self.first + index}]" if self.listed else self.field


@dataclass(frozen=True)
class TextBatch:
    """Token ids of several texts, one text after another; `token_types` tell the halves of pairs apart."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    token_types: NDArray[np.int8] | None = None

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Self:
        lengths = np.array([len(text) for text in texts], np.int32)
        kinds = None if types is None else np.fromiter(chain.from_iterable(types), np.int8)
        return cls(np.fromiter(chain.from_iterable(texts), np.int32), lengths, kinds)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The texts of all parts. Without token types of its own, a part has type 0."""
        if len(parts) == 1:
            return parts[0]
        types = None
        if any(part.token_types is not None for part in parts):
            given = ((part.token_types, len(part.tokens)) for part in parts)
            types = np.concatenate([np.zeros(size, np.int8) if kinds is None else kinds for kinds, size in given])
        tokens = np.concatenate([part.tokens for part in parts])
        return cls(tokens, np.concatenate([part.lengths for part in parts]), types)


class BatchTokenizer:
    """Tokenizes batches with a backend whose state it does not change. Safe to use from several threads."""

    def __init__(self, backend: Any, has_token_types: bool) -> None:
        self._backend = backend
        self._has_token_types = has_token_types

    def texts(self, texts: Sequence[str], bounds: Bounds) -> TextBatch:
        """Tokenizes texts. Raises RequestFailed that names the first text that is too long, or has no tokens."""
        _refuse_long(texts, bounds)
        special = bounds.add_special_tokens
        if not bounds.truncate:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=special)
            return _checked(TextBatch.of([each.ids for each in encodings]), bounds)
        room = max(0, bounds.limit - (self._backend.num_special_tokens_to_add(False) if special else 0))
        kept = self._encoded(texts, room, bounds.keep_end)
        if special:
            kept = [self._backend.post_process(each, add_special_tokens=True) for each in kept]
        return _checked(TextBatch.of([each.ids for each in kept]), bounds)

    def ids(self, texts: Sequence[Sequence[int]], bounds: Bounds) -> TextBatch:
        """Takes token ids as they are, and cuts them. Raises RequestFailed for one that is too long, or empty."""
        if bounds.truncate:
            texts = [_cut(text, bounds.limit, bounds.keep_end) for text in texts]
        return _checked(TextBatch.of(texts), bounds)

    def framed(self, bodies: Sequence[Sequence[str]], before: str, after: str, bounds: Bounds) -> TextBatch:
        """Tokenizes texts that each stand between two fixed ones, which are never cut; no special tokens are added.

        Each text comes in parts that are tokenized one by one.
        """
        _refuse_long(["".join(body) for body in bodies], bounds)
        first = self._backend.encode(before, add_special_tokens=False).ids
        last = self._backend.encode(after, add_special_tokens=False).ids
        room = max(0, bounds.limit - len(first) - len(last))
        whole = [body[0] if len(body) == 1 else "" for body in bodies]
        encodings = self._encoded(whole, room if bounds.truncate else None, bounds.keep_end)
        found = [each.ids for each in encodings]
        for i, body in enumerate(bodies):
            if len(body) > 1:
                parts = self._backend.encode_batch_fast(body, add_special_tokens=False)
                ids = [token for part in parts for token in part.ids]
                found[i] = ids if not bounds.truncate else _cut(ids, room, bounds.keep_end)
        return _checked(TextBatch.of([[*first, *ids, *last] for ids in found]), bounds)

    def pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], bounds: Bounds, most_of_second: int | None = None
    ) -> TextBatch:
        """Tokenizes pairs of texts, `seconds[i]` after `firsts[i]`; errors name the index of the second.

        The second text is the one that is cut: to `most_of_second` tokens in any case, and to what is left after the
        first if `bounds` ask for it. Raises RequestFailed for a pair that is too long.
        """
        _refuse_long(seconds, bounds)
        beginnings = {text: self._backend.encode(text, add_special_tokens=False) for text in dict.fromkeys(firsts)}
        special = self._backend.num_special_tokens_to_add(True)
        rooms = [bounds.limit - special - len(beginnings[text].ids) for text in firsts]
        if min(rooms) < 1:
            i = rooms.index(min(rooms))
            tokens = bounds.limit - rooms[i]
            raise _too_long(f"the text beside {bounds.where(i)}", tokens, bounds.limit, "shorten it", bounds.field)
        limits = [most_of_second, max(rooms) if bounds.truncate else None]
        most = min((limit for limit in limits if limit is not None), default=None)
        ends = self._encoded(seconds, most, bounds.keep_end)
        found = []
        for first, room, end in zip(firsts, rooms, ends, strict=True):
            if bounds.truncate and len(end.ids) > room:
                end.truncate(room, direction=_direction(bounds.keep_end))
            found.append(self._backend.post_process(beginnings[first], end, add_special_tokens=True))
        types = [each.type_ids for each in found] if self._has_token_types else None
        return _checked(TextBatch.of([each.ids for each in found], types), bounds)

    def _encoded(self, texts: Sequence[str], most: int | None, keep_end: bool) -> list[Any]:
        """The encodings of texts without special tokens, each cut to `most` tokens."""
        backend = self._backend
        if most is None:
            encodings: list[Any] = backend.encode_batch_fast(texts, add_special_tokens=False)
            return encodings
        size = _size(most)
        short = ["" if len(text) > size else text for text in texts]
        encodings = backend.encode_batch_fast(short, add_special_tokens=False)
        for i, text in enumerate(texts):
            if len(text) > size:
                encodings[i] = _kept(backend, text, most, keep_end)
            elif len(encodings[i].ids) > most:
                encodings[i].truncate(most, direction=_direction(keep_end))
        return encodings


def _kept(backend: Any, text: str, most: int, keep_end: bool) -> Any:
    """The encoding of the first or last `most` tokens of a long text, without special tokens.

    Tokenizes a part of the text that is large enough, and ends at a space if it has one.
    """
    size = _size(most)
    while True:
        part = _part(text, size, keep_end)
        encoding = backend.encode(part, add_special_tokens=False)
        if len(encoding.ids) >= most + _UNSURE_TOKENS or len(part) == len(text):
            encoding.truncate(most, direction=_direction(keep_end))
            return encoding
        size *= 4


def _part(text: str, size: int, keep_end: bool) -> str:
    if size >= len(text):
        return text
    if keep_end:
        part = text[-size:]
        start = min((place for place in map(part.find, _WHITESPACE) if place >= 0), default=0)
        return part[start:]
    part = text[:size]
    end = max(map(part.rfind, _WHITESPACE))
    return part[:end] if end > 0 else part


def _size(tokens: int) -> int:
    """Characters of a text that is tokenized whole although only `tokens` of it are kept."""
    return _CHARACTERS_PER_TOKEN * (tokens + _UNSURE_TOKENS) + _SHORTEST_LONG


def _cut(ids: Sequence[int], most: int, keep_end: bool) -> Sequence[int]:
    return ids[max(0, len(ids) - most) :] if keep_end else ids[:most]


def _direction(keep_end: bool) -> str:
    return "left" if keep_end else "right"


def _refuse_long(texts: Sequence[str], bounds: Bounds) -> None:
    """Raises RequestFailed for a text that is too long to be tokenized whole, if it is not to be cut."""
    for i, text in enumerate(() if bounds.truncate else texts):
        refuse_long(len(text), bounds.where(i))


def _checked(batch: TextBatch, bounds: Bounds) -> TextBatch:
    """The batch. Raises RequestFailed for a text that is too long, or has no tokens."""
    longest = int(batch.lengths.argmax())
    if batch.lengths[longest] > bounds.limit:
        first = int((batch.lengths > bounds.limit).argmax())
        remedy = f"shorten it{f', or send {bounds.remedy}' if bounds.remedy else ''}"
        raise _too_long(bounds.where(first), int(batch.lengths[first]), bounds.limit, remedy, bounds.field)
    if not batch.lengths.all():
        raise invalid(f"{bounds.where(int(batch.lengths.argmin()))} has no tokens: leave it out", bounds.field)
    return batch


def _too_long(what: str, tokens: int, limit: int, remedy: str, field: str) -> RequestFailed:
    message = f"{what} has {tokens} tokens; this model takes at most {limit}: {remedy}"
    return RequestFailed(ErrorKind.TOO_LONG, message, field=field, numbers={"tokens": tokens, "limit": limit})
