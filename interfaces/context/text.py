"""The context of a text request: one state machine, whichever of its two interfaces is used.

It holds the request's values, all tokens, and the progress of generation; a copy that crossed the wire goes on exactly
where the original stood. Only the grammar matcher stays behind: a process that continues compiles the grammar and feeds
it the generated tokens. Knows neither models nor text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interfaces.base.log_probabilities import LogProbabilities
from interfaces.base.request_id import RequestID
from interfaces.base.status import GenerationStatus
from interfaces.context.grammar_state import GrammarEnforcementSnapshot, GrammarState
from interfaces.context.index_view import IndexFace, IndexState, TextInputContext
from interfaces.context.protocols import InputContext, SpecDecodingState
from interfaces.context.stopping import EOSTracker
from interfaces.context.tokens import TokenBuffer
from interfaces.request.sampling import SamplingParams
from interfaces.result.outputs import TextGenerationOutput
from interfaces.wire.codec import F32Matrix
from interfaces.wire.equality import EqualByValue
from interfaces.wire.shared_memory import Segments

log = logging.getLogger("tokenyard")

# Stands for a token that is being sampled while its successor is prepared; no vocabulary has this id.
FUTURE_TOKEN = -999


@dataclass(slots=True)
class Progress:
    """Facts about generation so far that do not follow from the tokens.

    `absorbed` counts generated tokens that resets have made part of the prompt. `log_probabilities` maps positions to
    those not delivered yet. `prompt_log_probabilities` are those of the prompt's tokens that have arrived, from the
    first reported position on.
    """

    absorbed: int = 0
    log_probabilities: dict[int, LogProbabilities] = field(default_factory=dict)
    prompt_log_probabilities: LogProbabilities = field(default_factory=lambda: LogProbabilities([], []))


@dataclass(kw_only=True, eq=False)
class TextContext(IndexFace, EqualByValue):
    """The state of one text request.

    `max_length` bounds prompt and answer together; None leaves it to the model. ValueError when the values contradict
    each other, also after a journey over the wire.
    """

    wire_tag: ClassVar[str] = "text"

    tokens: TokenBuffer
    max_length: int | None
    request_id: RequestID = field(default_factory=RequestID)
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    eos_tracker: EOSTracker = field(default_factory=EOSTracker)
    log_probabilities: int = 0
    log_probabilities_echo: bool = False
    ignore_eos: bool = False
    json_schema: str | None = None
    # A grammar in another language; wins over `json_schema`.
    grammar: str | None = None
    grammar_state: GrammarState = field(default_factory=GrammarState)
    model_name: str = ""
    # Requests share cached prompt prefixes only with requests of the same salt.
    cache_salt: str = ""
    status: GenerationStatus = GenerationStatus.ACTIVE
    in_reasoning_phase: bool = False
    target_endpoint: str | None = None
    external_block_metadata: Any = None
    dkv_hint_instance_name: str = ""
    cached_prefix_length: int | None = None
    index_state: IndexState = field(default_factory=IndexState)
    progress: Progress = field(default_factory=Progress)
    draft_state: SpecDecodingState | None = None
    # Whether the hidden states of tokens are wanted, too: those from index `hidden_from` on.
    hidden_states: bool = False
    # Vectors that stand for the embeddings of the prompt's tokens, one each; the tokens are then only placeholders.
    prompt_embeddings: F32Matrix | None = None
    # Name and content digest of the adapter; empty: the base model.
    adapter: str = ""
    adapter_digest: str = ""
    hidden_from: int = 0
    matcher: Any = field(default=None, metadata={"wire": False}, repr=False)

    def __post_init__(self) -> None:
        if type(self.request_id) is not RequestID:
            self.request_id = RequestID(self.request_id)
        if not 0 <= self.progress.absorbed < self.tokens.prompt_length:
            raise ValueError(f"progress.absorbed must leave a prompt, got {self.progress.absorbed}")
        prompt = self.prompt_length
        least = self.min_tokens
        if self.max_length is not None and least + prompt > self.max_length:
            raise ValueError(
                f"max_length must be at least {least + prompt}, got {self.max_length}: "
                f"the prompt has {prompt} tokens and min_new_tokens is {least}"
            )
        if self.prompt_embeddings is not None and len(self.prompt_embeddings) != prompt:
            raise ValueError(
                f"prompt_embeddings must have one vector for each of the {prompt} tokens of the prompt, "
                f"got {len(self.prompt_embeddings)}"
            )
        _check_endpoint(self.target_endpoint)

    @classmethod
    def from_prompt(cls, prompt: ArrayLike, sampling_params: SamplingParams, **fields: Any) -> Self:
        """Make a fresh context that ends where `sampling_params` say: at its stop ids and length."""
        tokens = TokenBuffer(np.asarray(prompt, np.int64))
        length = sampling_params.max_new_tokens
        stop_ids = sampling_params.stop_token_ids
        fields.setdefault("max_length", None if length is None else len(tokens) + length)
        tracker = EOSTracker(eos_token_ids=set(stop_ids or ()), eos_stop_strings=sampling_params.stop or ())
        return cls(tokens=tokens, sampling_params=sampling_params, eos_tracker=tracker, **fields)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.request_id)

    @property
    def _context(self) -> Self:
        return self

    @property
    def prompt_length(self) -> int:
        """The tokens of the original prompt, without the generated tokens that a reset has added."""
        return self.tokens.prompt_length - self.progress.absorbed

    @property
    def next_prompt_report(self) -> int:
        """The first position of the prompt whose log-probabilities are still to come; its length when none are.

        Position 0 has none, because no token precedes it.
        """
        start = self.sampling_params.prompt_logprobs_from
        if start is None:
            return self.prompt_length
        known = len(self.progress.prompt_log_probabilities.token_log_probabilities)
        return min(max(start, 1) + known, self.prompt_length)

    @property
    def is_done(self) -> bool:
        return self.status.is_done

    @property
    def min_tokens(self) -> int:
        return self.sampling_params.min_new_tokens

    @property
    def is_initial_prompt(self) -> bool:
        """Whether nothing was generated since construction or the last reset."""
        return self.tokens.generated_length == 0

    @property
    def spec_decoding_state(self) -> SpecDecodingState:
        if self.draft_state is None:
            self.draft_state = SpecDecodingState()
        return self.draft_state

    def as_input_context(self) -> InputContext:
        """Wrap this context in its older interface, whose `tokens` are the padded array."""
        view: Any = TextInputContext(self)
        face: InputContext = view
        return face

    def share_arrays(self, segments: Segments) -> None:
        """Put large arrays of this context into shared memory, until `unshare_arrays`."""

    def unshare_arrays(self, segments: Segments) -> None:
        """Make the arrays this process's own again; no effect where they are."""

    # Tokens

    def update(self, new_token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """Finish a step. `new_token` follows, unless a chunk waits: then that becomes active, and the token is
        ignored."""
        if self.tokens.actively_chunked:
            self.tokens.advance_chunk()
            return
        self.advance_token_buffer(new_token, log_probabilities)
        self.advance_fsm(new_token)

    def advance_token_buffer(self, new_token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """Finish a step as `update`, without the grammar."""
        if self.tokens.actively_chunked:
            self.tokens.advance_chunk()
            return
        self._refuse_pending("no token can follow it")
        self.tokens.advance_with_token(new_token)
        self._store(log_probabilities)
        self._judge()

    def receive_token(self, token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """Append a token that was sampled and judged elsewhere; that judge also decides when the text has ended."""
        self.tokens.advance_with_token(token)
        self._store(log_probabilities)

    def receive_tokens(self, tokens: Sequence[int]) -> None:
        """Append several tokens that were judged elsewhere, without log probabilities."""
        self.tokens.advance_with_tokens(tokens)

    def receive_prompt_report(self, position: int, report: LogProbabilities) -> None:
        """Store the log-probabilities of the prompt's token at `position`; one that is known already is ignored."""
        if position != self.next_prompt_report:
            return
        known = self.progress.prompt_log_probabilities
        known.token_log_probabilities += report.token_log_probabilities
        known.top_log_probabilities += report.top_log_probabilities
        known.asked_log_probabilities += report.asked_log_probabilities

    def append_forced_token(self, token: int) -> None:
        """Append a jump-forward token: the grammar leaves no choice about it, and it was not sampled."""
        self._refuse_pending("no token can follow it")
        self.tokens.append_active(token)
        self._judge()

    def update_with_future_token(self) -> None:
        """Finish a step with a token that is not known yet. The grammar waits for the real one."""
        self.advance_token_buffer(FUTURE_TOKEN)

    def realize_future_token(self, new_token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """Replace the placeholder of `update_with_future_token`; the token may end the text. The grammar does not
        see it."""
        if not self._pending:
            raise ValueError("no future token is pending: update_with_future_token comes first")
        self.tokens.overwrite_last_token(new_token)
        self._store(log_probabilities)
        self._judge()

    def drop_last_tokens(self, n: int) -> None:
        """Forget the last generated tokens; a text that had ended goes on."""
        self.tokens.drop_last(n)
        if n:
            self._forget_log_probabilities()
            if self.status in (GenerationStatus.END_OF_SEQUENCE, GenerationStatus.MAXIMUM_LENGTH):
                self.status = GenerationStatus.ACTIVE

    def reset(self) -> None:
        """Turn all tokens into one prompt, to be encoded anew (eviction). Undelivered tokens stay to be delivered."""
        if self._pending:
            self.drop_last_tokens(1)
        self.progress.absorbed += self.tokens.generated_length
        self.tokens.reset_as_new_prompt()
        self.draft_state = None
        self.unassign_from_cache()

    def compute_num_available_steps(self, max_seq_len: int) -> int:
        """Return the steps until the sequence has `max_seq_len` tokens."""
        return max_seq_len - (len(self.tokens) - self.tokens.active_length)

    def get_min_token_logit_mask(self, num_steps: int) -> list[NDArray[np.int32]]:
        """Return for each step the pairs (row 0, token id) of ends that come too early; none once `min_tokens` are
        there."""
        generated = len(self.tokens) - self.prompt_length
        ends = np.array([[0, token] for token in sorted(self.eos_token_ids)], np.int32).reshape(-1, 2)
        return [ends if generated + step < self.min_tokens else ends[:0] for step in range(num_steps)]

    # Delivery

    def to_generation_output(self) -> TextGenerationOutput:
        """Return undelivered tokens, the one that ended the text included. ValueError while a future token is
        pending."""
        first, tokens = self._take_tokens()
        stored = self.progress.log_probabilities
        found = None
        if stored:
            found = [stored.pop(i) for i in range(first, first + len(tokens)) if i in stored] or None
        return TextGenerationOutput(self.request_id, tokens, self.status, found, self.cached_prefix_length)

    def take_outstanding(self) -> list[tuple[int, LogProbabilities | None]]:
        """Return undelivered tokens and their log probabilities, and mark them as delivered."""
        first, tokens = self._take_tokens()
        stored = self.progress.log_probabilities
        return [(token, stored.pop(i, None)) for i, token in enumerate(tokens, first)]

    def _take_tokens(self) -> tuple[int, list[int]]:
        """Return the position of the first undelivered token, and all of them, and mark them as delivered."""
        buffer = self.tokens
        first = buffer.delivered_length
        if first == len(buffer):
            return first, []
        self._refuse_pending("it cannot be delivered")
        tokens: list[int] = buffer.consume_recently_generated_tokens().tolist()
        return first, tokens

    # Grammar

    @property
    def grammar_enforced(self) -> bool:
        return self.grammar_state.grammar_enforced

    @grammar_enforced.setter
    def grammar_enforced(self, value: bool) -> None:
        self.grammar_state.grammar_enforced = value

    @property
    def tools_forced(self) -> bool:
        return self.grammar_state.tools_forced

    @tools_forced.setter
    def tools_forced(self, value: bool) -> None:
        self.grammar_state.tools_forced = value

    @property
    def requires_structured_output_flag(self) -> bool:
        return self.grammar_state.requires_structured_output_flag

    @requires_structured_output_flag.setter
    def requires_structured_output_flag(self, value: bool) -> None:
        self.grammar_state.requires_structured_output_flag = value

    def set_matcher(self, matcher: Any) -> None:
        """Enforce a grammar at once, unless a region set before decides when.

        `matcher.consume_token(token)` says whether the grammar takes a token.
        """
        self.matcher = matcher
        if not self.grammar_state.waits_for_region:
            self.grammar_enforced = True

    def advance_fsm(self, token: int) -> bool:
        """Advance the grammar by a generated token. False if there is no grammar.

        A token it refuses switches enforcement off for the rest: the text goes on, and the log has an error.
        """
        if self.matcher is None:
            return False
        if token in self.eos_token_ids:
            self.grammar_enforced = False
        elif self.update_enforcement_state(token) and not self.matcher.consume_token(token):
            log.error("request %s: its grammar refuses token %d and is off from here", self.request_id, token)
            self.matcher = None
            self.grammar_enforced = False
            return True
        return True

    def set_tool_region(self, start_token_ids: list[int] | None, end_token_ids: list[int] | None) -> None:
        self.grammar_state.set_tool_region(start_token_ids, end_token_ids)

    def set_thinking_region(self, start_token_ids: list[int] | None, end_token_ids: list[int] | None) -> None:
        self.grammar_state.set_thinking_region(start_token_ids, end_token_ids)

    def update_enforcement_state(self, token: int) -> bool:
        """Move between regions. True if the grammar must consume `token`."""
        return self.grammar_state.update(token, self.json_schema is not None or self.grammar is not None)

    def snapshot_grammar_state(self) -> GrammarEnforcementSnapshot:
        return self.grammar_state.snapshot()

    def restore_grammar_state(self, snapshot: GrammarEnforcementSnapshot) -> None:
        self.grammar_state.restore(snapshot)

    # Inside

    @property
    def _pending(self) -> bool:
        return self.tokens.last == FUTURE_TOKEN and self.tokens.generated_length > 0

    def _refuse_pending(self, why: str) -> None:
        if self._pending:
            raise ValueError(f"the last token is a future token that is not known yet: {why}")

    def _store(self, log_probabilities: LogProbabilities | None) -> None:
        if log_probabilities is not None:
            self.progress.log_probabilities[len(self.tokens) - 1] = log_probabilities

    def _forget_log_probabilities(self) -> None:
        stored = self.progress.log_probabilities
        length = len(self.tokens)
        self.progress.log_probabilities = {i: entry for i, entry in stored.items() if i < length}

    def _judge(self) -> None:
        """End the text when its last token does."""
        if not self.ignore_eos and self.eos_tracker.is_eos_from_tokens(self.tokens.all[self.prompt_length :]):
            self.status = GenerationStatus.END_OF_SEQUENCE
        elif self.max_length is not None and len(self.tokens) >= self.max_length:
            self.status = GenerationStatus.MAXIMUM_LENGTH


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in ("tcp", "ipc"):
        raise ValueError(f"target_endpoint must begin with tcp:// or ipc://, got {endpoint!r}")
    if scheme == "tcp" and ":" not in address:
        raise ValueError(f"target_endpoint tcp:// needs HOST:PORT, got {endpoint!r}")


for _face in (TextContext, TextInputContext):
    InputContext.register(_face)
