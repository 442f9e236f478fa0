"""One request as the scheduler holds it: its context, and the state that scheduling adds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from interfaces import (
    FIRST_VERSION,
    ImageMetadata,
    SamplingParams,
    SchedulingOptions,
    Submit,
    TextAndVisionContext,
    TextContext,
    TokenBuffer,
)
from scheduler.adapter import Adapter
from scheduler.prefix_cache import extend_hashes


@dataclass(frozen=True, slots=True)
class KvElsewhere:
    """K and V of the first `tokens` tokens of a sequence, in `blocks` of a worker that it has left.

    `index` and `epoch` are that worker's; `form` is its `WorkerHello.kv_form`, and `weights` the number of the version
    by which they were computed.
    """

    index: int
    epoch: int
    blocks: list[int]
    tokens: int
    form: str
    weights: int

    @property
    def place(self) -> tuple[int, int]:
        """Index and epoch of the worker."""
        return self.index, self.epoch


@dataclass(eq=False, slots=True)
class Sequence:
    """Where the request of `context` stands and runs.

    The context's tokens are the prompt, then every token that the client has been sent.
    """

    replica: bytes
    handle: int
    # Position by arrival. Lower came first; a preemption does not change it.
    order: int
    context: TextContext
    # Time of arrival on the scheduler's clock.
    arrived: float
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    # -1 while the sequence waits.
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    # By block size, which workers on different devices need not share, and whether the sequence runs alone there.
    hashes: dict[tuple[int, bool], list[bytes]] = field(default_factory=dict)
    # Prompt tokens found in the prefix cache, and microseconds until the first placement. Both are published with the
    # first token; `queued_us` is -1 before the placement and after it was published.
    cached_tokens: int = 0
    queued_us: int = -1
    # Tokens whose K and V were there when its row began to run.
    began_with: int = 0
    preemptions: int = 0
    # Whether a worker had no memory for it, although it was computed alone.
    failed_alone: bool = False
    # Whether it is known to fit the workers, which may not have been known when it came.
    checked: bool = False
    # Whether it has had a row.
    admitted: bool = False
    # Steps that its prompt took.
    chunks: int = 0
    # Guesses at its answer that were computed, and those that were right.
    guesses: tuple[int, int] = (0, 0)
    # First position of the prompt whose log-probabilities the client waits for; the prompt's length if there is none.
    next_report: int = 0
    # First token whose hidden state the client waits for, if it wants them.
    next_hidden: int = 0
    # None: the base model.
    adapter: Adapter | None = None
    # Number of the version of the weights with which it was placed last; some of its K and V is of that version, and
    # some of a later one, if `mixed`.
    weights: int = 0
    mixed: bool = False
    # What it has on a worker that it has left, until it is placed elsewhere and that has come.
    elsewhere: KvElsewhere | None = None
    # Whether it has left a worker for one that runs far fewer sequences.
    moved: bool = False
    # Name of the version that was published last, and all that were, by the number of generated tokens before.
    version: str = FIRST_VERSION
    versions: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, replica: bytes, submit: Submit, order: int, clock: Callable[[], float] = time.monotonic) -> Sequence:
        context = submit.text
        return cls(
            replica,
            submit.handle,
            order,
            context,
            clock(),
            submit.scheduling,
            next_report=context.next_prompt_report,
            next_hidden=context.hidden_from,
        )

    @property
    def returning(self) -> bool:
        """Whether it ran before, here or under another scheduler. It goes to the front of the queue then."""
        return self.admitted or self.emitted > 0

    @property
    def background(self) -> bool:
        """Whether it runs while nothing else does."""
        return self.scheduling.in_background

    @property
    def reports_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are missing."""
        return self.next_report < self.prompt_len

    @property
    def reusable(self) -> int:
        """Number of tokens that need no computing if their K/V is cached.

        At least one token must be computed, so that there are logits to sample from. The same holds for the token
        before a position to report, and for each token whose hidden state is wanted.
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
    def waiting(self) -> bool:
        return self.row < 0

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_len

    def limit(self, max_model_len: int) -> int:
        """Length in tokens, prompt included, at which the sequence ends."""
        wanted = self.context.max_length
        return max_model_len if wanted is None else min(max_model_len, wanted)

    def begin_with(self, weights: int) -> None:
        """Compute all of its K and V with this version of the weights."""
        self.mixed = False
        if self.weights != weights:
            self.weights = weights
            self.hashes.clear()

    def array(self) -> NDArray[np.int32]:
        """A copy of the tokens in the workers' form. Later growth does not touch it."""
        return self.tokens.all.astype(np.int32)

    def prefix_hashes(self, block_size: int, alone: bool = False) -> list[bytes]:
        """Digests of all full blocks of the tokens known now. What was computed `alone` has digests of its own."""
        hashes = self.hashes.setdefault((block_size, alone), [])
        if len(self.tokens) // block_size > len(hashes):
            extend_hashes(hashes, self.tokens.all, block_size, self.salt(alone), self.images)
        return hashes

    def salt(self, alone: bool = False) -> str:
        """Everything beside tokens and images that shapes hidden states, then the client's own salt.

        The first part has no NUL, so no client's salt can make it up.
        """
        apart = "alone" if alone else ""
        adapter = f"lora:{self.adapter.digest}" if self.adapter is not None else ""
        weights = f"weights:{self.weights}" if self.weights else ""
        return f"{apart}{adapter}{weights}\0{self.context.cache_salt}"
