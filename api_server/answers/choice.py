"""The facts of an answer that every dialect renders: its tokens and text so far, and its finish reason.

Knows nothing of where tokens come from, or how text is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from api_server.errors import ErrorKind, RequestFailed
from api_server.parsers.answer import ParsedAnswer
from api_server.parsers.scanner import Piece
from interfaces import LogProbabilities, SamplingParams, TextContext, TextGenerationRequest, TokenSlice


@dataclass(frozen=True, slots=True)
class Finish:
    """The finish reason. `matched` is the stop token's id, the stop string or the stop pattern; else None."""

    kind: Literal["stop_token", "stop_string", "length", "cancelled"]
    matched: int | str | None = None


def complete(finish: Finish | None) -> Finish:
    """Returns the finish of a complete answer. Raises RequestFailed for an answer that the server cut off."""
    if finish is None or finish.kind == "cancelled":
        reason = "the server ended this request before its answer was complete"
        raise RequestFailed(ErrorKind.UNAVAILABLE, reason, counted=True)
    return finish


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One generated token. `text` is what this token added to the text, special tokens included.

    `logprob` is None unless `sampling.logprobs` asked for it. `top` maps the most probable tokens to their logprobs,
    most probable first, and `asked` those that the request named.
    """

    id: int
    text: str
    logprob: float | None
    special: bool
    top: Mapping[int, float]
    asked: Mapping[int, float]


@dataclass(slots=True)  # one is made for each token, and frozen ones take three times as long to make
class TextDelta:
    """An update of choice `index`: `text` to append (stop strings cut, never part of a character), perhaps empty.

    `tokens` is empty unless `token_details` was asked for; `count` tokens arrived with this delta in any case. Tokens
    whose text is still held back (an unfinished character, a possible stop string) are in the delta in which they
    arrived. `finish` is set in the last delta of a choice, and in no other. `pieces` are empty unless `parse_answer`
    was asked for; then they are all that is new, in order, and `text` is the plain text among them.
    """

    index: int
    text: str
    count: int
    tokens: list[TokenDelta]
    finish: Finish | None
    pieces: Sequence[Piece] = ()


@dataclass
class Choice:
    """One answer to one prompt: the facts that every dialect renders. Times are `time.monotonic()`."""

    index: int
    request: TextGenerationRequest
    # Position of `request` in the batch.
    request_index: int
    # The prompt as text (after the chat template, before truncation); None when it came as token ids.
    prompt_text: str | None
    context: TextContext
    # True when nothing is generated and only the log-probabilities of the prompt are wanted.
    only_scores: bool = False
    # The name of the key that asked, empty without keys; and the name of the model, or of the adapter.
    tenant: str = ""
    model: str = ""

    # Generated tokens so far, with the stop token, up to the end of a stop string; more may have arrived.
    completion_tokens: int = 0
    # Details of the completion tokens, when `token_details` was asked for.
    tokens: list[TokenDelta] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    # Reasoning, text and calls in order, when `parse_answer` was asked for.
    answer: ParsedAnswer = field(default_factory=ParsedAnswer)
    # Reasoning tokens among the `completion_tokens`; 0 unless the format is known and the answer is parsed.
    reasoning_tokens: int = 0
    # Hidden states by the index of their token, prompt first, when they were asked for.
    hidden: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    # Versions of the weights that made the answer, each with the number of tokens before it; empty: the first one did.
    versions: list[tuple[int, str]] = field(default_factory=list)
    cached_tokens: int = 0
    # Guesses at the answer that the worker computed, and those that were right.
    guesses: tuple[int, int] = (0, 0)
    logprob_sum: float = 0.0
    finish: Finish | None = None

    submitted: float = 0.0
    # Seconds that the request waited for a worker; None if it never got one.
    queued: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def text(self) -> str:
        """The text of all deltas so far."""
        return "".join(self.pieces)

    @property
    def prompt_tokens(self) -> int:
        return self.context.prompt_length

    @property
    def prompt_token_ids(self) -> TokenSlice:
        return self.context.tokens.prompt

    @property
    def token_ids(self) -> list[int]:
        """The ids of the `completion_tokens` generated tokens."""
        ids: list[int] = self.context.tokens.generated[: self.completion_tokens].tolist()
        return ids

    @property
    def limit(self) -> int | None:
        """The most tokens that could be generated."""
        return 0 if self.only_scores else self.sampling.max_new_tokens

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the generated tokens, which ranks several answers."""
        return self.logprob_sum / max(1, self.completion_tokens)

    @property
    def prompt_logprobs(self) -> LogProbabilities:
        """Log-probabilities of the prompt from `first_prompt_logprob` on; complete with the first delta."""
        return self.context.progress.prompt_log_probabilities

    @property
    def first_prompt_logprob(self) -> int:
        """Index of the first prompt token with a log-probability; token 0 never has one."""
        return max(1, self.sampling.prompt_logprobs_from or 0)

    @property
    def sampling(self) -> SamplingParams:
        """The values in force: `max_new_tokens` is the limit and `seed` the seed that is used."""
        return self.context.sampling_params
