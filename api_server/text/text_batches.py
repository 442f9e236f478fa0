"""Tokenizes the texts and pairs of one-shot requests, many at once, and cuts those that are longer than they may be.

A text that is cut is tokenized only as far as it is kept. Knows a tokenizer's backend; knows no dialect and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from api_server.body.item_limits import MAX_TEXT
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.text.tokenizer import refuse_long

# Characters of a long text that are tokenized at first, for each token that is kept.
_CHARACTERS_PER_TOKEN = 6
# Tokens at the cut that are not trusted: the text beyond it might have changed them.
_UNSURE_TOKENS = 32
# Texts longer than this are tokenized apart from the others, as far as they are kept.
_SHORTEST_LONG = 256

# A text that every tokenizer knows: with it the special tokens around texts are found.
_ANY_TEXT = "a"

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

    def without_prompt(self, tokens: int) -> Self:
        """The same texts; pooling leaves their first tokens out, which a negative type marks."""
        starts = self.lengths.cumsum() - self.lengths
        places = np.arange(len(self.tokens)) - np.repeat(starts, self.lengths)
        return replace(self, token_types=np.where(places < tokens, -1, 0).astype(np.int8))

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


@dataclass(frozen=True)
class Frame:
    """The special tokens that a tokenizer puts before, between and after texts, and the token types of all."""

    special: tuple[list[int], ...]
    special_types: tuple[list[int], ...]
    # One for each text.
    types: tuple[int, ...]

    @classmethod
    def of(cls, encoding: Any, texts: int) -> Self:
        """The frame of an encoding of so many texts."""
        special: list[list[int]] = [[] for _ in range(texts + 1)]
        special_types: list[list[int]] = [[] for _ in range(texts + 1)]
        types = [0] * texts
        place = 0
        for token, kind, text in zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True):
            if text is None:
                special[place].append(token)
                special_types[place].append(kind)
            else:
                place = text + 1
                types[text] = kind
        return cls(tuple(special), tuple(special_types), tuple(types))

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.special))

    def around(self, *texts: list[int]) -> list[int]:
        found = list(self.special[0])
        for text, special in zip(texts, self.special[1:], strict=True):
            found += text
            found += special
        return found

    def types_of(self, *lengths: int) -> list[int]:
        found = list(self.special_types[0])
        for length, kind, special in zip(lengths, self.types, self.special_types[1:], strict=True):
            found += [kind] * length
            found += special
        return found


_NO_FRAME = Frame(([], []), ([], []), (0,))


class BatchTokenizer:
    """Tokenizes batches with a backend whose state it does not change. Safe to use from several threads."""

    def __init__(self, backend: Any, has_token_types: bool) -> None:
        self._backend = backend
        self._has_token_types = has_token_types
        self._single = Frame.of(backend.encode(_ANY_TEXT), 1)
        self._pair = Frame.of(backend.encode(_ANY_TEXT, _ANY_TEXT), 2)

    def texts(self, texts: Sequence[str], bounds: Bounds) -> TextBatch:
        """Tokenizes texts. Raises RequestFailed that names the first text that is too long, or has no tokens."""
        _refuse_long(texts, bounds)
        frame = self._single if bounds.add_special_tokens else _NO_FRAME
        room = max(0, bounds.limit - frame.size) if bounds.truncate else None
        found = self._ids(texts, room, bounds.keep_end)
        return _checked(TextBatch.of([frame.around(ids) for ids in found]), bounds)

    def prompt_length(self, prompt: str, add_special_tokens: bool = True) -> int:
        """The tokens before a text that come from its prompt, and from the tokenizer's own beginning."""
        frame = self._single if add_special_tokens else _NO_FRAME
        return len(frame.special[0]) + len(self._backend.encode(prompt, add_special_tokens=False).ids)

    def check_alone(self, text: str, bounds: Bounds, field: str) -> None:
        """Raises RequestFailed for a text, from `field`, that leaves no room for others beside it."""
        tokens = len(self._backend.encode(text, add_special_tokens=False).ids)
        if tokens >= bounds.limit:
            raise _too_long(field, tokens, bounds.limit, "shorten it", field)

    def ids(self, texts: Sequence[list[int]], bounds: Bounds) -> TextBatch:
        """Takes token ids as they are, and cuts them. Raises RequestFailed for one that is too long, or empty."""
        if bounds.truncate:
            texts = [_cut(text, bounds.limit, bounds.keep_end) for text in texts]
        return _checked(TextBatch.of(texts), bounds)

    def framed(
        self,
        bodies: Sequence[Sequence[str]],
        before: str,
        after: str,
        bounds: Bounds,
        heads: Sequence[str] = (),
        most_after_head: int | None = None,
    ) -> TextBatch:
        """Tokenizes texts that each stand between two fixed ones, which are never cut; no special tokens are added.

        Each text comes in parts that are tokenized one by one. It begins with its head, which is never cut; the rest is
        cut at its end, to `most_after_head` tokens in any case. Raises RequestFailed for a head that leaves no room.
        """
        _refuse_long(["".join(body) for body in bodies], bounds)
        first = self._backend.encode(before, add_special_tokens=False).ids
        last = self._backend.encode(after, add_special_tokens=False).ids
        # Every text begins with its head, so one that leaves no room is refused before any text is tokenized.
        distinct = list(dict.fromkeys(heads))
        lengths = {head: len(ids) for head, ids in zip(distinct, self._ids(distinct, None, False), strict=True)}
        for i, head in enumerate(heads):
            tokens = lengths[head] + len(first) + len(last)
            if tokens >= bounds.limit:
                raise _too_long(f"the text beside {bounds.where(i)}", tokens, bounds.limit, "shorten it", bounds.field)
        room = max(0, bounds.limit - len(first) - len(last)) if bounds.truncate else None
        found = self._ids([body[0] if len(body) == 1 else "" for body in bodies], room, False)
        for i, body in enumerate(bodies):
            if len(body) > 1:
                found[i] = self._joined(body, room)
        if most_after_head is not None:
            found = [ids[: lengths[head] + most_after_head] for head, ids in zip(heads, found, strict=True)]
        return _checked(TextBatch.of([[*first, *ids, *last] for ids in found]), bounds)

    def pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], bounds: Bounds, most_of_second: int | None = None
    ) -> TextBatch:
        """Tokenizes pairs of texts, `seconds[i]` after `firsts[i]`; errors name the index of the second.

        The second text is the one that is cut: to `most_of_second` tokens in any case, and to what is left after the
        first if `bounds` ask for it. Raises RequestFailed for a pair that is too long.
        """
        _refuse_long(seconds, bounds)
        distinct = list(dict.fromkeys(firsts))
        ids = dict(zip(distinct, self._ids(distinct, None, False), strict=True))
        frame = self._pair
        rooms = [bounds.limit - frame.size - len(ids[text]) for text in firsts]
        if min(rooms) < 1:
            i = rooms.index(min(rooms))
            tokens = bounds.limit - rooms[i]
            raise _too_long(f"the text beside {bounds.where(i)}", tokens, bounds.limit, "shorten it", bounds.field)
        limits = [most_of_second, max(rooms) if bounds.truncate else None]
        most = min((limit for limit in limits if limit is not None), default=None)
        ends = self._ids(seconds, most, bounds.keep_end)
        if bounds.truncate:
            ends = [_cut(end, room, bounds.keep_end) for end, room in zip(ends, rooms, strict=True)]
        pairs = [(ids[first], end) for first, end in zip(firsts, ends, strict=True)]
        types = [frame.types_of(*map(len, pair)) for pair in pairs] if self._has_token_types else None
        return _checked(TextBatch.of([frame.around(*pair) for pair in pairs], types), bounds)

    def _joined(self, parts: Sequence[str], most: int | None) -> list[int]:
        """The ids of parts that are tokenized one by one, as far as they are kept."""
        ids: list[int] = []
        for part in parts:
            if most is not None and len(ids) >= most:
                break
            ids += self._ids([part], None if most is None else most - len(ids), False)[0]
        return ids

    def _ids(self, texts: Sequence[str], most: int | None, keep_end: bool) -> list[list[int]]:
        """The ids of texts without special tokens, each cut to `most`."""
        backend = self._backend
        if most is None:
            return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]
        size = _size(most)
        short = ["" if len(text) > size else text for text in texts]
        found = [_cut(each.ids, most, keep_end) for each in backend.encode_batch_fast(short, add_special_tokens=False)]
        for i, text in enumerate(texts):
            if len(text) > size:
                found[i] = _kept(backend, text, most, keep_end)
        return found


def _kept(backend: Any, text: str, most: int, keep_end: bool) -> list[int]:
    """The first or last `most` tokens of a long text, without special tokens.

    Tokenizes a part of the text that is large enough, and ends at a space if it has one. Raises RequestFailed for a
    text of which too much would be tokenized.
    """
    first = _size(most)
    size = first
    while True:
        part = _part(text, size, keep_end)
        ids: list[int] = backend.encode(part, add_special_tokens=False).ids
        if len(ids) >= most + _UNSURE_TOKENS or len(part) == len(text):
            return _cut(ids, most, keep_end)
        size *= 4
        if size > max(MAX_TEXT, first):
            refuse_long(len(text), "a text that is to be cut")


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


def _cut(ids: list[int], most: int | None, keep_end: bool) -> list[int]:
    if most is None or len(ids) <= most:
        return ids
    return ids[len(ids) - most :] if keep_end else ids[:most]


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
