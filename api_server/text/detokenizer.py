"""Decodes tokens to text as they come: the pieces joined are the text decoded at once; no piece cuts a character.

Two ways. A byte-level vocabulary (GPT-2's alphabet: most models today) turns each token into bytes, and an
incremental UTF-8 decoder does the rest. Every other vocabulary is decoded by the tokenizer itself over a short window,
of which only the new end is taken. Knows the `tokenizers` library; knows no stop strings and no requests.
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from tokenizers import decoders

# Prompt tokens that decide how the answer's first token is spelled (a leading space, say).
_CONTEXT = 6

# Most tokens of an unfinished character. A character has at most 4 bytes; more tokens are garbage, which is shown.
_LONGEST_WAIT = 16

_REPLACEMENT = "�"


class Detokenizer(Protocol):
    """State of one answer."""

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""

    def flush(self) -> str:
        """The rest at the end: unfinished bytes, as replacement characters."""


class Vocabulary:
    """The vocabulary that the detokenizers of one model share."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        # Tokens that no text is cut into, special ones and others.
        self.added = frozenset(added)
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}
        # Text of the byte-level tokens met so far whose bytes are whole characters.
        self.whole: dict[int, str] = {}
        self._pieces: dict[int, str] = {}

    def detokenizer(self, context: Sequence[int], skip_special_tokens: bool, kept: Collection[int] = ()) -> Detokenizer:
        """Makes a detokenizer. The special tokens in `kept` are not skipped."""
        skipped = self.special.difference(kept) if skip_special_tokens else frozenset()
        return _ByteLevel(self, skipped) if self._byte_level else _Windowed(self, context, skipped)

    def piece(self, token: int) -> str:
        """The text of a token inside a text; bytes that are no whole character, as replacement characters."""
        if self._byte_level:
            return self.bytes_of(token).decode("utf-8", "replace")
        found = self._pieces.get(token)
        if found is None:
            # The token is decoded after itself: alone, it may lose its leading space.
            window = _Windowed(self, [token], frozenset())
            found = self._pieces[token] = window.add(token) or window.flush()
        return found

    def raw(self, token: int) -> bytes:
        """The bytes of a token, as far as the vocabulary has them."""
        return self.bytes_of(token) if self._byte_level else self.piece(token).encode()

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a byte-level token; empty for an id that the vocabulary does not have."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = _to_bytes(self.backend.id_to_token(token) or "")
            with contextlib.suppress(UnicodeDecodeError):
                self.whole[token] = found.decode()
        return found


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    # Added tokens are stored as they read, not in the byte alphabet; like the library, take them as text when a
    # character is outside of it.
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


class _ByteLevel:
    """Decodes bytes. Whole characters bypass the decoder unless it waits for the rest of a character."""

    __slots__ = ("_bytes_of", "_decoder", "_skipped", "_waits", "_whole")

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._whole = vocabulary.whole
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waits = False

    def add(self, token: int) -> str:
        if token in self._skipped:
            return ""
        if not self._waits and (whole := self._whole.get(token)) is not None:
            return whole
        text = self._decoder.decode(self._bytes_of(token))
        self._waits = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._waits = False
        return self._decoder.decode(b"", True)


class _Windowed:
    """Decodes `window` (old tokens, already emitted, then new ones) and takes what comes after the old ones' text.

    The window's front keeps some emitted text, because a token alone may be spelled otherwise than after another one.
    """

    __slots__ = ("_backend", "_old", "_old_text", "_skipped", "_window")

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int], skipped: frozenset[int]) -> None:
        self._backend = vocabulary.backend
        self._skipped = skipped
        self._window = [token for token in context[-_CONTEXT:] if token not in skipped]
        self._old = len(self._window)
        self._old_text = self._decode(self._window)

    def add(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        waiting = len(self._window) - self._old
        if len(text) <= len(self._old_text) or (text.endswith(_REPLACEMENT) and waiting < _LONGEST_WAIT):
            return ""
        new = text[len(self._old_text) :]
        self._window = self._window[self._old :]
        self._old = len(self._window)
        self._old_text = self._decode(self._window)
        return new

    def flush(self) -> str:
        return self._decode(self._window)[len(self._old_text) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=False))
