"""TextContext by both of its faces against a naive model, over random walks; then what single operations promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from interfaces.base.log_probabilities import LogProbabilities
from interfaces.base.request_id import RequestID
from interfaces.base.status import GenerationStatus
from interfaces.context.protocols import EmbeddingsContext, InputContext, TextGenerationContext
from interfaces.context.stopping import EOSTracker
from interfaces.context.text import FUTURE_TOKEN, TextContext
from interfaces.context.tokens import TokenBuffer
from interfaces.request.sampling import SamplingParams
from interfaces.wire.codec import WireError, msgpack_numpy_decoder, msgpack_numpy_encoder

EOS, SEQUENCE, MAX_LENGTH, MIN_TOKENS = 0, [1, 2], 18, 2
ACTIVE, END, MAXIMUM = GenerationStatus.ACTIVE, GenerationStatus.END_OF_SEQUENCE, GenerationStatus.MAXIMUM_LENGTH

token = st.integers(0, 6)
logprob = st.none() | st.floats(-5, 0).map(lambda value: LogProbabilities([value], [{}]))


def context_of(*prompt: int, max_length: int | None = MAX_LENGTH, min_tokens: int = 0, **fields: object) -> TextContext:
    return TextContext(
        tokens=TokenBuffer(np.array(prompt, np.int64)),
        max_length=max_length,
        sampling_params=SamplingParams(min_new_tokens=min_tokens, seed=1),
        eos_tracker=EOSTracker(eos_token_ids={EOS}, eos_sequences=[SEQUENCE]),
        **fields,  # type: ignore[arg-type]
    )


def travelled(context: TextContext) -> TextContext:
    copy: TextContext = msgpack_numpy_decoder(TextContext)(msgpack_numpy_encoder()(context))
    return copy


class Walk(RuleBasedStateMachine):
    @initialize(prompt=st.lists(token, min_size=1, max_size=8))
    def begin(self, prompt: list[int]) -> None:
        self.context = context_of(*prompt, min_tokens=MIN_TOKENS)
        self.tokens = list(prompt)
        self.asked = self.prompt = len(prompt)
        self.start, self.end = 0, len(prompt)
        self.delivered = len(prompt)
        self.status = ACTIVE
        self.logprobs: dict[int, LogProbabilities] = {}

    @property
    def old(self) -> InputContext:
        return self.context.as_input_context()

    @property
    def chunked(self) -> bool:
        return self.end < len(self.tokens)

    @property
    def pending(self) -> bool:
        return len(self.tokens) > self.prompt and self.tokens[-1] == FUTURE_TOKEN

    def appended(self, logprob: LogProbabilities | None) -> None:
        self.end = len(self.tokens)
        if logprob is not None:
            self.logprobs[len(self.tokens) - 1] = logprob
        self.judge()

    def judge(self) -> None:
        answer = self.tokens[self.asked :]
        if answer[-1] == EOS or answer[-2:] == SEQUENCE:
            self.status = END
        elif len(self.tokens) >= MAX_LENGTH:
            self.status = MAXIMUM

    def refused(self, method: object, *arguments: object) -> None:
        with pytest.raises(ValueError):
            method(*arguments)  # type: ignore[operator]

    def forget(self, n: int) -> None:
        del self.tokens[len(self.tokens) - n :]
        length = len(self.tokens)
        self.start, self.end, self.delivered = min(self.start, length - 1), length, min(self.delivered, length)
        self.logprobs = {i: entry for i, entry in self.logprobs.items() if i < length}
        if self.status in (END, MAXIMUM):
            self.status = ACTIVE

    @rule(new=token, logprob=logprob, by_old_face=st.booleans())
    def update(self, new: int, logprob: LogProbabilities | None, by_old_face: bool) -> None:
        face = self.old if by_old_face else self.context
        if self.chunked:
            face.update(new, logprob)
            self.start, self.end = self.end, len(self.tokens)
        elif self.pending:
            self.refused(face.update, new)
        else:
            face.update(new, logprob)
            self.start = len(self.tokens)
            self.tokens.append(new)
            self.appended(logprob)

    @rule()
    def future(self) -> None:
        if self.chunked:
            self.context.update_with_future_token()
            self.start, self.end = self.end, len(self.tokens)
        elif self.pending:
            self.refused(self.context.update_with_future_token)
        else:
            self.context.update_with_future_token()
            self.start = len(self.tokens)
            self.tokens.append(FUTURE_TOKEN)
            self.appended(None)

    @rule(new=token, logprob=logprob)
    def realize(self, new: int, logprob: LogProbabilities | None) -> None:
        if not self.pending:
            self.refused(self.context.realize_future_token, new)
            return
        self.context.realize_future_token(new, logprob)
        self.tokens[-1] = new
        if logprob is not None:
            self.logprobs[len(self.tokens) - 1] = logprob
        self.judge()

    @rule(new=token)
    def jump(self, new: int) -> None:
        if self.pending or self.chunked:
            self.refused(self.old.jump_ahead, new)
            return
        self.old.jump_ahead(new)
        self.tokens.append(new)
        self.appended(None)

    @rule(n=st.integers(-1, 4))
    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self.tokens) - self.prompt:
            self.refused(self.old.rollback, n)
            return
        self.old.rollback(n)
        if n:
            self.forget(n)

    @rule(by_old_face=st.booleans())
    def reset(self, by_old_face: bool) -> None:
        (self.old if by_old_face else self.context).reset()
        if self.pending:
            self.forget(1)
        self.prompt = self.end = len(self.tokens)
        self.start = 0

    @rule(size=st.integers(1, 8), by_old_face=st.booleans())
    def chunk(self, size: int, by_old_face: bool) -> None:
        active = self.end - self.start
        if size >= active:
            return
        if by_old_face:
            self.old.bump_token_indices(active_idx=size - active)
        else:
            self.context.tokens.chunk(size)
        self.end = self.start + size

    @rule(n=st.integers(0, 8), by_old_face=st.booleans())
    def skip(self, n: int, by_old_face: bool) -> None:
        if n >= self.end - self.start:
            self.refused(self.old.bump_token_indices, n)
            self.refused(self.context.tokens.skip_processing, n)
        elif by_old_face:
            self.old.bump_token_indices(start_idx=n)
            self.start += n
        else:
            self.context.tokens.skip_processing(n)
            self.start += n

    @rule(start=st.integers(-2, 20), active=st.integers(-2, 20), end=st.integers(-2, 20))
    def set_indices(self, start: int, active: int, end: int) -> None:
        if not 0 <= start < active <= end or end < self.prompt or end > len(self.tokens):
            if end <= len(self.tokens):
                self.refused(self.old.set_token_indices, start, active, end)
            return
        self.old.set_token_indices(start, active, end)
        del self.tokens[end:]
        self.start, self.end, self.delivered = start, active, min(self.delivered, end)

    @rule()
    def drain_new(self) -> None:
        if self.pending:
            self.refused(self.context.to_generation_output)
            return
        output = self.context.to_generation_output()
        entries = [self.logprobs.pop(i) for i in range(self.delivered, len(self.tokens)) if i in self.logprobs]
        assert output.tokens == self.tokens[self.delivered :]
        assert output.log_probabilities == (entries or None)
        assert output.final_status == self.status
        self.delivered = len(self.tokens)

    @rule()
    def drain_old(self) -> None:
        if self.pending:
            self.refused(self.old.outstanding_completion_tokens)
            return
        last = len(self.tokens) - 1
        wanted = [(self.tokens[i], self.logprobs.pop(i, None)) for i in range(self.delivered, last + 1)]
        if self.status is END and wanted:
            wanted.pop()
        assert self.old.outstanding_completion_tokens() == wanted
        self.delivered = len(self.tokens)

    @rule()
    def travel(self) -> None:
        copy = travelled(self.context)
        assert copy == self.context
        self.context = copy

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "context"):
            return
        context, old, n = self.context, self.old, len(self.tokens)
        assert old.all_tokens.tolist() == context.tokens.all.tolist() == self.tokens
        assert (old.start_idx, old.active_idx, old.end_idx) == (self.start, self.end, n)
        assert old.prompt_tokens.tolist() == self.tokens[: self.prompt]
        assert old.generated_tokens.tolist() == self.tokens[self.prompt :]
        assert old.next_tokens.tolist() == context.tokens.active.tolist() == self.tokens[self.start : self.end]
        assert old.tokens.shape == (128,)
        assert old.tokens[:n].tolist() == self.tokens
        assert not old.tokens[n:].any()
        assert old.status == context.status == self.status
        assert old.is_done == context.is_done == (self.status is not ACTIVE)
        assert old.is_ce == (self.end - self.start > 1)
        assert old.is_initial_prompt == context.is_initial_prompt == (n == self.prompt)
        assert context.compute_num_available_steps(50) == 50 - (n - (self.end - self.start))
        masks = context.get_min_token_logit_mask(3)
        assert [bool(len(mask)) for mask in masks] == [n - self.asked + i < MIN_TOKENS for i in range(3)]


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_it_is_all_that_it_should_be() -> None:
    context = context_of(1, 2)
    for protocol in (TextGenerationContext, EmbeddingsContext, InputContext):
        assert isinstance(context, protocol)
    assert isinstance(context.as_input_context(), InputContext)
    assert isinstance(context.request_id, RequestID)
    assert context_of(1, request_id="plain").request_id == RequestID("plain")


def test_available_steps_of_the_interface() -> None:
    context = context_of(*[3] * 5, max_length=20)
    steps = [context.compute_num_available_steps(20)]
    context.update(3)
    steps.append(context.compute_num_available_steps(20))
    context.update(3)
    steps.append(context.compute_num_available_steps(20))
    assert steps == [20, 15, 14]


def test_cache_slots() -> None:
    context = context_of(1)
    assert not context.is_assigned_to_cache
    with pytest.raises(ValueError, match="no cache slot"):
        _ = context.cache_seq_id
    context.assign_to_cache(5)
    assert context.cache_seq_id == 5
    with pytest.raises(ValueError, match="already"):
        context.assign_to_cache(6)
    context.reset()
    context.unassign_from_cache()
    assert not context.is_assigned_to_cache


def test_informational_indices_are_stored_and_travel() -> None:
    context = context_of(1, 2)
    context.set_token_indices(committed_idx=2)
    context.bump_token_indices(committed_idx=1)
    context.set_draft_offset(-1)
    assert (context.committed_idx, context.index_state.draft_offset) == (3, -1)
    assert travelled(context).committed_idx == 3


def test_writing_through_the_old_face_changes_the_context() -> None:
    context = context_of(1, 2)
    view = context.as_input_context()
    view.update_status(GenerationStatus.CANCELLED)
    assert context.status is GenerationStatus.CANCELLED
    view.cached_prefix_length = 3  # type: ignore[attr-defined]
    assert context.cached_prefix_length == 3


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"max_length": 4, "min_tokens": 3}, "max_length must be at least 5"),
        ({"target_endpoint": "http://x"}, "tcp:// or ipc://"),
        ({"target_endpoint": "nothing"}, "tcp:// or ipc://"),
        ({"target_endpoint": "tcp://host"}, "HOST:PORT"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        context_of(1, 2, **fields)  # type: ignore[arg-type]
    assert context_of(1, 2, target_endpoint="tcp://host:5").target_endpoint == "tcp://host:5"


def test_a_reset_context_with_a_long_answer_still_travels() -> None:
    context = context_of(5, max_length=6, min_tokens=4)
    for _ in range(4):
        context.update(5)
    context.reset()
    assert travelled(context) == context
    context.update(5)
    assert context.status is MAXIMUM


def test_a_contradiction_on_the_wire_is_a_wire_error() -> None:
    context = context_of(1, 2, 3, max_length=5)
    context.max_length = 2
    with pytest.raises(WireError, match="max_length must be at least 3"):
        travelled(context)


def test_ignored_eos_does_not_end() -> None:
    context = context_of(1, ignore_eos=True)
    context.update(EOS)
    assert context.status is ACTIVE


class Matcher:
    """Takes even tokens."""

    def __init__(self) -> None:
        self.fed: list[int] = []

    def consume_token(self, token: int) -> bool:
        self.fed.append(token)
        return token % 2 == 0


def test_chunks_future_tokens_and_eos_are_not_fed_to_the_grammar() -> None:
    context, matcher = context_of(4, 4, 4), Matcher()
    context.set_matcher(matcher)
    context.tokens.chunk(1)
    context.update(6)
    context.update(8)
    context.update_with_future_token()
    context.realize_future_token(10)
    assert context.advance_fsm(10)
    context.update(EOS)
    assert matcher.fed == [8, 10]
    assert not context.grammar_enforced


def test_a_grammar_that_refuses_a_token_is_off_from_there(caplog: pytest.LogCaptureFixture) -> None:
    context, matcher = context_of(4), Matcher()
    context.set_matcher(matcher)
    assert context.advance_fsm(3)
    assert "refuses token 3" in caplog.text
    assert not context.grammar_enforced
    context.update(4)
    assert matcher.fed == [3]


def test_thinking_then_grammar_and_back() -> None:
    context, matcher = context_of(4, json_schema="{}"), Matcher()
    context.set_thinking_region([20, 22], [30, 32])
    context.set_matcher(matcher)
    snapshots = []
    for token in (2, 30, 4, 30, 32, 6, 8):
        snapshots.append(context.snapshot_grammar_state())
        context.update(token)
    assert matcher.fed == [6, 8], "the region's end is not fed"
    context.restore_grammar_state(snapshots[4])
    assert not context.update_enforcement_state(32)
    assert context.grammar_enforced


def test_optional_tools_are_enforced_between_their_delimiters() -> None:
    context = context_of(4)
    context.set_tool_region(None, None)
    context.set_tool_region([20, 22], [30])
    fed = [context.update_enforcement_state(token) for token in (20, 2, 20, 22, 4, 30, 4)]
    assert fed == [False, False, False, True, True, True, False]
    context.tools_forced = True
    context.grammar_enforced = True
    assert context.update_enforcement_state(30), "a forced tool has no end"


def test_speculative_state_lives_until_a_reset() -> None:
    context = context_of(1)
    context.spec_decoding_state.draft_tokens_to_verify.append(4)
    assert travelled(context).spec_decoding_state.draft_tokens_to_verify == [4]
    context.reset()
    assert context.spec_decoding_state.draft_tokens_to_verify == []


def test_a_matcher_stays_in_its_process() -> None:
    context = context_of(1)
    context.set_matcher(Matcher())
    assert travelled(context).matcher is None


def test_contexts_compare_by_content_and_hash_by_name() -> None:
    context = context_of(1, 2, request_id="a")
    assert context == context_of(1, 2, request_id="a")
    assert context != context_of(1, 3, request_id="a")
    assert len({context, context_of(1, 2, request_id="a")}) == 1
