"""One request as the scheduler holds it: its context, and what scheduling adds to it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from interfaces import (
    ImageMetadata,
    SamplingParams,
    Submit,
    Terms,
    TextAndVisionContext,
    TextContext,
    TokenBuffer,
)
from scheduler.prefix_cache import extend_hashes


@dataclass(eq=False, slots=True)
class Sequence:
    """Where the request of `context` stands and runs.

    `order` is its place in the line: lower came first, and keeps it through preemptions. The context's tokens are the
    prompt and then every token the client has been sent. `row` is -1 while it waits. `cached_tokens` and `queued_us`,
    the microseconds it waited for its first placement (-1: not placed yet, or told), are news that the next token
    carries. `checked` says that it fits the workers, which may not have been known when it came; `admitted` that it
    had a place once. `chunks` counts the steps that its prompt took. `next_report` is the first position of the prompt
    whose log-probabilities its client still waits for; the prompt's length when there is none. `next_hidden` is the
    first token whose hidden state it waits for, if it wants them.
    """

    replica: bytes
    handle: int
    order: int
    context: TextContext
    terms: Terms = field(default_factory=Terms)
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    hashes: dict[int, list[bytes]] = field(default_factory=dict)
    """By block size, which workers on different devices need not share."""
    cached_tokens: int = 0
    preemptions: int = 0
    arrived: float = field(default_factory=time.monotonic)
    queued_us: int = -1
    checked: bool = False
    admitted: bool = False
    chunks: int = 0
    next_report: int = 0
    next_hidden: int = 0

    @classmethod
    def of(cls, replica: bytes, submit: Submit, order: int) -> Sequence:
        context = submit.context
        return cls(replica, submit.handle, order, context, submit.terms, next_report=context.next_prompt_report)

    @property
    def returning(self) -> bool:
        """Whether it ran before, here or under another scheduler: it does not stand in line again."""
        return self.admitted or self.emitted > 0

    @property
    def reports_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.next_report < self.prompt_len

    @property
    def reusable(self) -> int:
        """Tokens that need no computing if their K/V is there.

        One token must be computed, so that there are logits to sample from; before a position that is to be reported,
        too, and each token whose hidden state is to be told.
        """
        known = (self.next_report if self.reports_prompt else len(self.tokens)) - 1
        return min(known, self.next_hidden) if self.context.hidden_states else known

    @property
    def tokens(self) -> TokenBuffer:
        return self.context.tokens

    @property
    def prompt_len(self) -> int:
        return self.context.prompt_length

    @property
    def sampling(self) -> SamplingParams:
        return self.context.sampling_params

    @property
    def images(self) -> list[ImageMetadata]:
        return self.context.images if isinstance(self.context, TextAndVisionContext) else []

    @property
    def next_images(self) -> list[ImageMetadata]:
        """Images with tokens that are still to be computed."""
        return self.context.next_images if isinstance(self.context, TextAndVisionContext) else []

    @property
    def waiting(self) -> bool:
        return self.row < 0

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_len

    def limit(self, max_model_len: int) -> int:
        """Length in tokens, prompt included, at which the sequence ends."""
        wanted = self.context.max_length
        return max_model_len if wanted is None else min(max_model_len, wanted)

    def array(self) -> NDArray[np.int32]:
        """The tokens in the workers' form: a copy that later growth does not touch."""
        return self.tokens.all.astype(np.int32)

    def prefix_hashes(self, block_size: int) -> list[bytes]:
        """Digests of all full blocks of the tokens known so far."""
        hashes = self.hashes.setdefault(block_size, [])
        if len(self.tokens) // block_size > len(hashes):
            salt = self.context.cache_salt + ("\0deterministic" if self.terms.deterministic else "")
            extend_hashes(hashes, self.tokens.all, block_size, salt, self.images)
        return hashes
