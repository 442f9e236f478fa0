"""The tokens of one sequence, and three views of them: content, processing, delivery.

    content      prompt = [0, prompt_length)    generated = [prompt_length, n)
    processing   processed = [0, start)         active = [start + offset, end)      pending = [end, n): if chunked
    delivery     what the client has            what is ready for it = [delivered, n)

Every change keeps `0 <= start <= end <= n` and `1 <= prompt_length <= n`; after a change of the processing window at
least one token is active. Knows numbers only: no status, no EOS, no request.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from interfaces.wire.codec import I64

TokenSlice: TypeAlias = NDArray[np.int64]

# `TokenBuffer.padded` has a multiple of this length.
CHUNK_SIZE = 128

# Tokens that a repr shows at either end.
_SHOWN = 8


@dataclass(slots=True)
class Range:
    """Positions from `start` up to and without `end`; falsy when empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"a range needs 0 <= start <= end, got start={self.start}, end={self.end}")

    def __len__(self) -> int:
        return self.end - self.start

    def bump_start(self, amount: int) -> None:
        if not 0 <= self.start + amount <= self.end:
            raise ValueError(f"start {self.start} cannot move by {amount}: it must stay within 0..{self.end}")
        self.start += amount

    def bump_end(self, amount: int) -> None:
        if self.end + amount < self.start:
            raise ValueError(f"end {self.end} cannot move by {amount}: it must stay at {self.start} or beyond")
        self.end += amount

    def advance(self) -> None:
        """Empty the range at its end."""
        self.start = self.end


@dataclass(slots=True)
class TokenBufferState:
    """A TokenBuffer on the wire."""

    tokens: I64
    prompt_length: int
    start: int
    end: int
    offset: int
    delivered: int


@dataclass(slots=True, eq=False, repr=False)
class TokenBuffer:
    """A growing array of tokens, with three views. `array` is the store, which may be longer than the tokens.

    Appending a token takes amortised constant time.
    """

    wire_type: ClassVar[type] = TokenBufferState

    array: TokenSlice
    _length: int = field(init=False)
    _prompt_length: int = field(init=False)
    _start: int = field(init=False)
    _end: int = field(init=False)
    _offset: int = field(init=False, default=0)
    _delivered: int = field(init=False)

    def __post_init__(self) -> None:
        given = self.array
        if not isinstance(given, np.ndarray) or given.dtype != np.int64:
            got = getattr(given, "dtype", type(given).__name__)
            raise ValueError(f"tokens must be an array of int64, got {got}; convert with np.asarray(tokens, np.int64)")
        if given.ndim != 1 or not len(given):
            raise ValueError(f"tokens must be a one-dimensional array with at least one token, got shape {given.shape}")
        # The caller's array stays the caller's, and one that came off the wire cannot be written.
        self.array = given.copy()
        self._length = self._prompt_length = self._end = self._delivered = len(given)
        self._start = 0

    # Content

    @property
    def all(self) -> TokenSlice:
        return self.array[: self._length]

    @property
    def prompt(self) -> TokenSlice:
        return self.array[: self._prompt_length]

    @property
    def generated(self) -> TokenSlice:
        return self.array[self._prompt_length : self._length]

    @property
    def last(self) -> int:
        """The last token of all."""
        return int(self.array[self._length - 1])

    @property
    def prompt_length(self) -> int:
        return self._prompt_length

    @property
    def generated_length(self) -> int:
        return self._length - self._prompt_length

    @property
    def padded(self) -> TokenSlice:
        """A copy of all tokens, followed by zeros up to a multiple of CHUNK_SIZE."""
        padded = np.zeros(-(-self._length // CHUNK_SIZE) * CHUNK_SIZE, np.int64)
        padded[: self._length] = self.all
        return padded

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenSlice: ...
    def __getitem__(self, index: int | np.integer[Any] | slice) -> int | TokenSlice:
        if isinstance(index, slice):
            return self.all[index]
        try:
            position = operator.index(index)
        except TypeError:
            raise TypeError(f"tokens are indexed by integers and slices, not by {type(index).__name__}") from None
        if not -self._length <= position < self._length:
            raise IndexError(f"token {position} of {self._length}")
        return int(self.array[position % self._length])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.all, dtype=dtype, copy=copy)

    # Processing

    @property
    def active(self) -> TokenSlice:
        """The input of the next step."""
        return self.array[self._start + self._offset : self._end]

    @property
    def active_length(self) -> int:
        return self._end - self._start - self._offset

    @property
    def processed_length(self) -> int:
        return self._start

    @property
    def current_position(self) -> int:
        """Position after the active tokens, whatever the processing offset."""
        return self._end

    @property
    def actively_chunked(self) -> bool:
        """Whether tokens wait behind the active ones."""
        return self._end < self._length

    def chunk(self, chunk_size: int) -> None:
        """Leave only the first `chunk_size` active tokens active; the others wait for `advance_chunk`."""
        if not 0 < chunk_size < self.active_length:
            raise ValueError(f"chunk_size must be between 1 and {self.active_length - 1}, got {chunk_size}")
        self._begin_where_active()
        self._end = self._start + chunk_size

    def advance_chunk(self) -> None:
        """Finish the chunk: all tokens that waited behind it are active now."""
        if not self.actively_chunked:
            raise ValueError("there is no chunk to advance: all tokens are active already")
        self._start = self._end
        self._end = self._length
        self._offset = 0

    def skip_processing(self, n: int) -> None:
        """Skip the first `n` active tokens, which need no processing (a prefix-cache hit); one must stay active."""
        if not 0 <= n < self.active_length:
            raise ValueError(f"n must be between 0 and {self.active_length - 1}, got {n}")
        self._begin_where_active()
        self._start += n

    def rewind_processing(self, n: int) -> None:
        """Make the last `n` processed tokens active again."""
        most = self._start + min(self._offset, 0)
        if not 0 <= n <= most:
            raise ValueError(f"n must be between 0 and {most}, got {n}")
        self._start -= n

    def apply_processing_offset(self, offset: int) -> None:
        """Shift the visible beginning of the active tokens; replaces the offset before, does not add to it."""
        if not 0 <= self._start + offset <= self._end:
            raise ValueError(f"offset must be between {-self._start} and {self._end - self._start}, got {offset}")
        self._offset = offset

    def set_window(self, start: int, end: int, length: int) -> None:
        """Set the processing window, and the number of tokens (more: zeros; fewer: the last are forgotten)."""
        if not 0 <= start < end <= length:
            raise ValueError(f"the window needs 0 <= start < end <= length, got {start}, {end}, {length}")
        if length < self._prompt_length:
            raise ValueError(f"the length must be at least the prompt's {self._prompt_length}, got {length}")
        if length > len(self.array):
            self._grow(length)
        self.array[self._length : length] = 0
        self._start = start
        self._end = end
        self._length = length
        self._offset = 0
        self._delivered = min(self._delivered, length)

    # Growth

    def advance_with_token(self, token: int) -> None:
        """Finish all active tokens and append `token`, which is the only active one now."""
        length = self._length
        if self._end != length:
            raise ValueError("a chunk is being processed: no token can follow before advance_chunk")
        if length == len(self.array):
            self._grow(length + 1)
        self.array[length] = token
        self._start = length
        self._end = self._length = length + 1
        self._offset = 0

    def advance_with_tokens(self, tokens: Sequence[int]) -> None:
        """Append tokens as `advance_with_token` does for one after the other, at the price of one."""
        if len(tokens) == 1:
            self.advance_with_token(tokens[0])
            return
        if self._end != self._length:
            raise ValueError("a chunk is being processed: no token can follow before advance_chunk")
        if not len(tokens):
            return
        length = self._length + len(tokens)
        if length > len(self.array):
            self._grow(length)
        self.array[self._length : length] = tokens
        self._start = length - 1
        self._end = self._length = length
        self._offset = 0

    def append_active(self, token: int) -> None:
        """Append `token`, which was not sampled: it still has to be processed, with those that are active."""
        start = self._start
        offset = self._offset
        self.advance_with_token(token)
        self._start = start
        self._offset = offset

    def overwrite_last_token(self, token: int) -> None:
        if self._length == self._prompt_length:
            raise ValueError("the last token belongs to the prompt and is not overwritten")
        self.array[self._length - 1] = token

    def drop_last(self, n: int) -> None:
        """Forget the last `n` generated tokens; those that were delivered count as never delivered."""
        if not 0 <= n <= self.generated_length:
            raise ValueError(f"n must be between 0 and the {self.generated_length} generated tokens, got {n}")
        if n:
            length = self._length - n
            self.set_window(min(self._start, length - 1), length, length)

    def reset_as_new_prompt(self, delete_last_generated_token: bool = False) -> None:
        """Make all tokens a prompt to be processed. Undelivered ones stay ready for delivery."""
        if delete_last_generated_token:
            if self._length == self._prompt_length:
                raise ValueError("there is no generated token to delete")
            self.drop_last(1)
        self._prompt_length = self._end = self._length
        self._start = self._offset = 0

    # Delivery

    @property
    def has_outstanding_generated_tokens(self) -> bool:
        return self._delivered < self._length

    @property
    def delivered_length(self) -> int:
        """The position of the first token that is ready for delivery; the length when there is none."""
        return self._delivered

    def consume_recently_generated_tokens(self) -> TokenSlice:
        """Return the tokens that are ready, as a view, and mark them as delivered."""
        if self._delivered == self._length:
            raise ValueError("no generated token is ready: see has_outstanding_generated_tokens")
        ready = self.array[self._delivered : self._length]
        self._delivered = self._length
        return ready

    # The whole

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenBuffer):
            return NotImplemented
        return self._marks == other._marks and bool(np.array_equal(self.all, other.all))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = [str(token) for token in self.all[:_SHOWN].tolist()]
        if self._length > 2 * _SHOWN:
            shown += ["...", *(str(token) for token in self.all[-_SHOWN:].tolist())]
        else:
            shown += [str(token) for token in self.all[_SHOWN:].tolist()]
        return (
            f"TokenBuffer(actively_chunked={self.actively_chunked}, active={self.active_length}, "
            f"prompt={self._prompt_length}, generated={self.generated_length}, total={self._length}, "
            f"tokens=[{', '.join(shown)}])"
        )

    def to_wire(self) -> TokenBufferState:
        return TokenBufferState(self.all, *self._marks)

    @classmethod
    def from_wire(cls, state: TokenBufferState) -> Self:
        n = len(state.tokens)
        prompt_length = state.prompt_length
        start = state.start
        end = state.end
        offset = state.offset
        delivered = state.delivered
        marks = 1 <= prompt_length <= n and 0 <= delivered <= n and 0 <= start <= end <= n and end > 0
        if not marks or not 0 <= start + offset <= end:
            marks_of_state = (prompt_length, start, end, offset, delivered)
            raise ValueError(f"the marks of a token buffer contradict each other: {n} tokens, {marks_of_state}")
        buffer = cls(state.tokens)
        buffer._prompt_length = prompt_length
        buffer._start = start
        buffer._end = end
        buffer._offset = offset
        buffer._delivered = delivered
        return buffer

    @property
    def _marks(self) -> tuple[int, int, int, int, int]:
        return self._prompt_length, self._start, self._end, self._offset, self._delivered

    def _begin_where_active(self) -> None:
        # With a negative offset the beginning could otherwise pass the end.
        self._start = self._start + self._offset
        self._offset = 0

    def _grow(self, needed: int) -> None:
        capacity = len(self.array)
        while capacity < needed:
            capacity *= 2
        grown = np.zeros(capacity, np.int64)
        grown[: self._length] = self.all
        self.array = grown
