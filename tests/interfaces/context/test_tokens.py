"""TokenBuffer against a list of tokens and six numbers, over random walks; the worked vectors of the interface."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from interfaces.context.tokens import Range, TokenBuffer
from interfaces.wire.codec import msgpack_numpy_decoder, msgpack_numpy_encoder

token = st.integers(0, 2**31 - 1)


def buffer_of(*tokens: int) -> TokenBuffer:
    return TokenBuffer(np.array(tokens, np.int64))


class Walk(RuleBasedStateMachine):
    """Every change is made to the buffer and to a naive model, which must agree on all that can be asked."""

    @initialize(prompt=st.lists(token, min_size=1, max_size=12))
    def begin(self, prompt: list[int]) -> None:
        self.buffer = buffer_of(*prompt)
        self.tokens = list(prompt)
        self.prompt = len(prompt)
        self.start, self.end, self.offset = 0, len(prompt), 0
        self.delivered = len(prompt)

    @property
    def active(self) -> list[int]:
        return self.tokens[self.start + self.offset : self.end]

    def expect(self, allowed: bool, method: str, *arguments: object) -> bool:
        if allowed:
            getattr(self.buffer, method)(*arguments)
        else:
            with pytest.raises(ValueError):
                getattr(self.buffer, method)(*arguments)
        return allowed

    @rule(new=token)
    def advance(self, new: int) -> None:
        if self.expect(self.end == len(self.tokens), "advance_with_token", new):
            self.tokens.append(new)
            self.start, self.end, self.offset = len(self.tokens) - 1, len(self.tokens), 0

    @rule(new=st.lists(token, max_size=9))
    def advance_by_several(self, new: list[int]) -> None:
        if self.expect(self.end == len(self.tokens), "advance_with_tokens", new) and new:
            self.tokens += new
            self.start, self.end, self.offset = len(self.tokens) - 1, len(self.tokens), 0

    @rule(new=token)
    def append(self, new: int) -> None:
        if self.expect(self.end == len(self.tokens), "append_active", new):
            self.tokens.append(new)
            self.end += 1

    @rule(size=st.integers(-1, 14))
    def chunk(self, size: int) -> None:
        if self.expect(0 < size < len(self.active), "chunk", size):
            self.start, self.offset = self.start + self.offset, 0
            self.end = self.start + size

    @rule()
    def advance_chunk(self) -> None:
        if self.expect(self.end < len(self.tokens), "advance_chunk"):
            self.start, self.end, self.offset = self.end, len(self.tokens), 0

    @rule(n=st.integers(-1, 12))
    def skip(self, n: int) -> None:
        if self.expect(0 <= n < len(self.active), "skip_processing", n):
            self.start, self.offset = self.start + self.offset + n, 0

    @rule(n=st.integers(-1, 12))
    def rewind(self, n: int) -> None:
        if self.expect(0 <= n <= self.start + min(self.offset, 0), "rewind_processing", n):
            self.start -= n

    @rule(offset=st.integers(-6, 6))
    def shift(self, offset: int) -> None:
        if self.expect(0 <= self.start + offset <= self.end, "apply_processing_offset", offset):
            self.offset = offset

    @rule(new=token)
    def overwrite(self, new: int) -> None:
        if self.expect(len(self.tokens) > self.prompt, "overwrite_last_token", new):
            self.tokens[-1] = new

    @rule(n=st.integers(-1, 5))
    def drop(self, n: int) -> None:
        if self.expect(0 <= n <= len(self.tokens) - self.prompt, "drop_last", n) and n:
            del self.tokens[len(self.tokens) - n :]
            self.start, self.end, self.offset = min(self.start, len(self.tokens) - 1), len(self.tokens), 0
            self.delivered = min(self.delivered, len(self.tokens))

    @rule(delete=st.booleans())
    def reset(self, delete: bool) -> None:
        if self.expect(not delete or len(self.tokens) > self.prompt, "reset_as_new_prompt", delete):
            if delete:
                self.tokens.pop()
                self.delivered = min(self.delivered, len(self.tokens))
            self.prompt = self.end = len(self.tokens)
            self.start = self.offset = 0

    @rule()
    def deliver(self) -> None:
        if self.delivered == len(self.tokens):
            with pytest.raises(ValueError, match="no generated token"):
                self.buffer.consume_recently_generated_tokens()
        else:
            ready = self.buffer.consume_recently_generated_tokens().tolist()
            assert ready == self.tokens[self.delivered :]
            self.delivered = len(self.tokens)

    @precondition(lambda self: hasattr(self, "buffer"))
    @rule()
    def travel(self) -> None:
        copy = msgpack_numpy_decoder(TokenBuffer)(msgpack_numpy_encoder()(self.buffer))
        assert copy == self.buffer
        self.buffer = copy

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "buffer"):
            return
        buffer, tokens = self.buffer, self.tokens
        assert len(buffer) == len(tokens)
        assert buffer.all.tolist() == tokens
        assert buffer.prompt.tolist() == tokens[: self.prompt]
        assert buffer.generated.tolist() == tokens[self.prompt :]
        assert buffer.active.tolist() == self.active
        assert buffer.active_length == len(self.active)
        assert (buffer.prompt_length, buffer.generated_length) == (self.prompt, len(tokens) - self.prompt)
        assert (buffer.processed_length, buffer.current_position) == (self.start, self.end)
        assert buffer.actively_chunked == (self.end < len(tokens))
        assert buffer.has_outstanding_generated_tokens == (self.delivered < len(tokens))
        assert buffer[-1] == tokens[-1]
        assert buffer[1:].tolist() == tokens[1:]


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_worked_vector() -> None:
    buffer = TokenBuffer(np.arange(10))
    buffer.chunk(4)
    assert (buffer.active.tolist(), buffer.current_position) == ([0, 1, 2, 3], 4)
    buffer.advance_chunk()
    assert (buffer.active.tolist(), buffer.processed_length) == ([4, 5, 6, 7, 8, 9], 4)
    buffer.advance_with_token(77)
    assert (len(buffer), buffer.processed_length, buffer.active.tolist()) == (11, 10, [77])
    assert buffer.generated_length == 1
    assert buffer.has_outstanding_generated_tokens


def test_the_store_doubles() -> None:
    buffer = buffer_of(1, 2, 3)
    sizes = [len(buffer.array)]
    for i in range(45):
        buffer.advance_with_token(i)
        sizes.append(len(buffer.array))
    assert list(dict.fromkeys(sizes)) == [3, 6, 12, 24, 48]


def test_a_position_does_not_depend_on_the_offset() -> None:
    buffer = TokenBuffer(np.arange(10))
    buffer.advance_with_token(5)
    buffer.apply_processing_offset(-2)
    assert buffer.active.tolist() == [8, 9, 5]
    assert buffer.current_position == 11


def test_undelivered_tokens_survive_a_reset() -> None:
    buffer = buffer_of(1, 2)
    buffer.advance_with_token(3)
    buffer.reset_as_new_prompt()
    assert buffer.prompt.tolist() == [1, 2, 3]
    assert buffer.consume_recently_generated_tokens().tolist() == [3]


@pytest.mark.parametrize(
    "array",
    [
        np.empty(0, np.int64),
        np.zeros((2, 2), np.int64),
        np.zeros(3, np.int32),
        np.zeros(3),
        [1, 2],
        np.array(5),
    ],
)
def test_what_cannot_be_tokens_is_refused(array: object) -> None:
    with pytest.raises(ValueError, match="tokens must be"):
        TokenBuffer(array)  # type: ignore[arg-type]


def test_the_callers_array_stays_the_callers() -> None:
    array = np.array([1, 2])
    buffer = TokenBuffer(array)
    buffer.advance_with_token(3)
    buffer.overwrite_last_token(4)
    array[0] = 99
    assert buffer.all.tolist() == [1, 2, 4]


def test_indices() -> None:
    buffer = buffer_of(*range(10, 15))
    assert buffer[np.int64(1)] == 11
    assert type(buffer[0]) is int
    assert buffer[-2:].tolist() == [13, 14]
    for bad in (5, -6):
        with pytest.raises(IndexError):
            buffer[bad]
    with pytest.raises(TypeError):
        buffer["a"]  # type: ignore[call-overload]
    assert np.asarray(buffer).tolist() == [10, 11, 12, 13, 14]


def test_padding_is_zeros_to_a_multiple_of_128() -> None:
    buffer = TokenBuffer(np.full(130, 7))
    assert len(buffer.padded) == 256
    assert not buffer.padded[130:].any()


def test_repr_shows_both_ends() -> None:
    text = repr(TokenBuffer(np.arange(100)))
    assert "..." in text
    assert "[0, 1, 2, 3, 4, 5, 6, 7, ..., 92, 93, 94, 95, 96, 97, 98, 99]" in text
    assert "total=100" in text


def test_range() -> None:
    span = Range(2, 5)
    assert len(span) == 3
    span.bump_start(2)
    span.bump_end(-1)
    assert (span, bool(span)) == (Range(4, 4), False)
    span = Range(1, 3)
    span.advance()
    assert span == Range(3, 3)
    for bad in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError):
            Range(*bad)
    for method, amount in (("bump_start", 1), ("bump_start", -4), ("bump_end", -1)):
        with pytest.raises(ValueError):
            getattr(Range(3, 3), method)(amount)
