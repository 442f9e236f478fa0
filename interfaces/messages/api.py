"""Messages between API replicas and the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from interfaces.context.codec_windows import ClipContext, CodecContext, CodecFacts
from interfaces.context.media import SpeechContext
from interfaces.context.painting import PaintingContext
from interfaces.context.pooling import PoolingContext
from interfaces.context.synthesis import SynthesisContext
from interfaces.context.text import TextContext
from interfaces.context.vision import TextAndVisionContext
from interfaces.messages.adapters import AdapterStatus
from interfaces.messages.hidden_states import HiddenStates
from interfaces.messages.logprob_reports import LogprobReports
from interfaces.messages.weights import FIRST_VERSION, WeightsStatus
from interfaces.result.pooled_values import PooledValues
from interfaces.result.results import RequestError
from interfaces.wire.codec import F32, I8, I32, message

_LARGEST_INT32 = 2**31 - 1

# `Results.number` of the first message after a replica was registered is a multiple of this.
REGISTRATION_SIZE = 2**32


@message(1)
@dataclass(frozen=True, slots=True)
class Hello:
    """Registers a replica, and is its heartbeat every second; a replica that falls silent is treated as dead.

    `handles` are the requests that it holds open. The scheduler cancels the replica's other requests, and answers
    `Unknown` when it does not have one that is named: so either side learns of requests that the other has lost.
    """

    replica: str
    handles: I32 = field(default_factory=lambda: np.empty(0, np.int32))


# A request of this priority, or of a lower one, runs while nothing else does.
LOWEST_PRIORITY = -1000


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """The scheduling options of a request.

    `tenant` is whose share of the server it takes, and `weight` how large that share is beside others'. A higher
    `priority` is admitted first; one of the lowest runs while nothing else does. It fails when it is not on a worker
    after `queue_seconds`, or has not ended after `total_seconds`. A stream that has a name in `resume` outlives its
    replica and its client for a while: a Submit with the same name takes it over, from its first token.
    `deterministic`: its answer depends on no other request, and on no replay, in any dtype. `trace_id` is for log
    lines; empty: it belongs to no trace. `span_id` is the span of the HTTP request that it is part of; empty where that
    is not recorded.
    """

    tenant: str = ""
    weight: int = 1
    priority: int = 0
    queue_seconds: float | None = None
    total_seconds: float | None = None
    resume: str = ""
    deterministic: bool = False
    trace_id: str = ""
    span_id: str = ""

    def __post_init__(self) -> None:
        if self.weight < 1:
            raise ValueError(f"weight must be at least 1, got {self.weight}")

    @property
    def in_background(self) -> bool:
        """Whether it runs while nothing else does."""
        return self.priority <= LOWEST_PRIORITY


@message(2)
@dataclass(frozen=True, slots=True)
class Submit:
    """A request: its whole context.

    The generated tokens in it are those that the client has already, when a replica resubmits. `again` marks such a
    resubmission, or the next part of an answer: it has waited in the queue before, and is not refused for its length.

    `context.eos_tracker` has the EOS ids that apply. Stop strings are found in the API process, which then cancels the
    request. Large arrays in it may stand in shared memory: they are the replica's until the request ends.

    A `PoolingContext` (a `SynthesisContext`, a `PaintingContext`, a `CodecContext` and a `ClipContext` are ones, too)
    is a one-shot request: its answers are `Vectors`, and `Results` only when it fails or is ended.
    """

    handle: int
    context: (
        TextContext
        | TextAndVisionContext
        | SpeechContext
        | PoolingContext
        | SynthesisContext
        | PaintingContext
        | CodecContext
        | ClipContext
    )
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    again: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.handle <= _LARGEST_INT32:
            raise ValueError(f"handle must fit 31 bits, got {self.handle}")
        if isinstance(self.context, PoolingContext):
            return
        if any(not 0 <= token <= _LARGEST_INT32 for token in self.context.eos_token_ids):
            raise ValueError("eos_token_ids must be token ids: 31 bits")

    @property
    def text(self) -> TextContext:
        """The context of a request that generates. TypeError for a one-shot request."""
        if isinstance(self.context, PoolingContext):
            raise TypeError(f"request {self.context.request_id} is a one-shot request: it generates no text")
        return self.context


@message(3)
@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends requests that no client waits for any more (client gone, stop string found). Idempotent.

    Unknown handles are ignored.
    """

    handles: I32


@message(4)
@dataclass(frozen=True, slots=True)
class Goodbye:
    """Ends a replica in order: the scheduler forgets it and its requests."""

    replica: str


class Finish:
    """Codes of `Results.finished`."""

    ACTIVE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    FAILED = 4


@message(5)
@dataclass(slots=True)
class Results:
    """All outputs of one step for one replica, as columns: entry i is a token of `handles[i]`.

    `tokens[i]` is -1 when the entry carries no token (a failure, say). `finished` holds `Finish` codes. `cached` maps a
    handle to its prompt tokens served from the prefix cache, in the entry with its first token. `errors` has a reason
    for each FAILED handle. `incarnation` names the scheduler process that sends them. `queued` maps a handle to the
    microseconds from its arrival to its placement on a worker; it comes with the first token, or with the end of a
    request that was placed and got none. `reports` and `hidden` come with or before their tokens. `guesses` maps a
    handle to how many guesses at its answer were computed, and how many of them were right. `versions` maps a handle to
    versions of the weights, by the number of generated tokens before the first that one makes; it is the first before.

    `number` counts the `Results` and `Vectors` to this replica. One that does not follow the last, and is not the first
    after a registration (`REGISTRATION_SIZE`), shows that some were lost between them.
    """

    incarnation: int
    handles: I32
    tokens: I32
    finished: I8
    logprobs: F32 | None = None
    cached: dict[int, int] = field(default_factory=dict)
    errors: dict[int, RequestError] = field(default_factory=dict)
    queued: dict[int, int] = field(default_factory=dict)
    reports: LogprobReports | None = None
    hidden: HiddenStates | None = None
    number: int = 0
    guesses: dict[int, list[int]] = field(default_factory=dict)
    versions: dict[int, dict[int, str]] = field(default_factory=dict)


@message(15)
@dataclass(slots=True)
class Vectors:
    """Values of texts of a one-shot request: those from index `first` on, by the indices of its `Submit`.

    The request has ended when the values of all its texts have come. `queued_us` is the time from its arrival to its
    first batch, in microseconds. `number` counts as that of `Results`, together with it. With a `preview` above 0 the
    values are that preview of an image that is not done, and the others are still to come.
    """

    incarnation: int
    handle: int
    first: int
    values: PooledValues
    queued_us: int = 0
    number: int = 0
    preview: int = 0


@message(14)
@dataclass(frozen=True, slots=True)
class Unknown:
    """Answers a `Hello`: the scheduler does not have these requests. Everything it had of them was sent before this.

    The replica submits again those that are still open, with the tokens it has. `dropped`: the scheduler had given the
    whole replica up, so the requests are not the reason.
    """

    incarnation: int
    handles: I32
    dropped: bool


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The state of one worker as the scheduler sees it.

    `blocks_cached` are free but still hold a reusable prefix; `drafted`, `accepted`, `drafts` and `accepted_at` are
    the worker's own counts (`WorkerHello`), a second old at most, and so are those of images: `encoded` in
    `encode_ms`, and `image_hits`. `backend` describes in words what runs the model. `steps` counts batches of texts,
    too. Sequences of `placed_tokens` tokens were placed on it; `saved_tokens` of these were in its prefix cache.
    Of `spill_slots` places beside its cache `spill_used` hold blocks; `spilled_blocks` were saved there, and
    `loaded_tokens` came back. Its steps have at most `max_rows` sequences and `step_tokens` tokens, as it has sized its
    memory and the operator allows; a batch of texts at most `text_tokens` tokens, 0 where it takes none.
    """

    device: str
    index: int
    epoch: int
    running: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    steps: int
    seconds_since_step: float
    drafted: int = 0
    accepted: int = 0
    backend: str = ""
    tasks: list[str] = field(default_factory=list)
    encoded: int = 0
    image_hits: int = 0
    encode_ms: int = 0
    drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)
    placed_tokens: int = 0
    saved_tokens: int = 0
    spill_slots: int = 0
    spill_used: int = 0
    spilled_blocks: int = 0
    loaded_tokens: int = 0
    max_rows: int = 0
    step_tokens: int = 0
    text_tokens: int = 0


@message(6)
@dataclass(frozen=True, slots=True)
class Status:
    """State of the scheduler, sent to every replica twice a second and at once when readiness changes.

    `incarnation` differs after a restart: requests of another incarnation must be resubmitted. Counters only grow.
    """

    incarnation: int
    ready: bool
    reason: str
    workers: list[WorkerStatus]
    waiting: int
    running: int
    max_model_len: int
    max_running: int
    block_size: int
    vocab_size: int
    counters: dict[str, int]
    # Width of the model's embeddings; 0 without workers.
    hidden_size: int = 0
    # What some worker can do: GENERATE, and values of `PoolingTask`.
    tasks: list[str] = field(default_factory=list)
    # Width of the vectors of a text; 0 where no worker makes any.
    vector_width: int = 0
    # Names of the labels of a classifier, in the order of their numbers.
    labels: list[str] = field(default_factory=list)
    # What the workers do with images: a value of `WorkerHello.images`, the least of all.
    images: int = 0
    adapters: list[AdapterStatus] = field(default_factory=list)
    # Whether some worker takes adapters.
    takes_adapters: bool = False
    # The logits processors that every worker has: the schemas of their parameters, as JSON text, by name.
    processors: dict[str, str] = field(default_factory=dict)
    # Whether an operator has paused generation.
    paused: bool = False
    weights: WeightsStatus = field(default_factory=lambda: WeightsStatus(0, FIRST_VERSION, "", [], False))
    # Measured time of the work that waits, in seconds.
    backlog_seconds: float = 0.0
    # Of the codec of a model that generates speech tokens.
    codec: CodecFacts | None = None


class Action:
    """Codes of `Order.action`.

    FLUSH_CACHE drops every cached prefix; refused while requests run or wait. ABORT ends requests of all replicas with
    `Finish.CANCELLED` and what they have. PAUSE lets no new step start until CONTINUE; with it, requests go on from
    where they are. RETRACT sends the running ones back in line, so that they hold no blocks; they are computed again.
    DRAIN keeps new requests waiting and lets the running ones go on, until PAUSE or CONTINUE; its answer counts those
    that still run, and none in a pause. It ends by itself after some seconds without DRAIN_ON, which answers the same,
    and is refused when it has ended.
    """

    FLUSH_CACHE = 0
    ABORT = 1
    PAUSE = 2
    CONTINUE = 3
    RETRACT = 4
    DRAIN = 5
    DRAIN_ON = 6


@message(7)
@dataclass(frozen=True, slots=True)
class Order:
    """An operator's order to the scheduler. `number` is the replica's name for it, and comes back in the answer.

    `request_ids` are for ABORT: requests whose id begins with one of them; an empty one means every request.
    """

    number: int
    action: int
    request_ids: list[str] = field(default_factory=list)


@message(8)
@dataclass(frozen=True, slots=True)
class OrderAnswer:
    """Answers an order: it was carried out, unless `refused` has a reason. `requests` counts those that it changed."""

    incarnation: int
    number: int
    refused: str
    requests: int


@message(12)
@dataclass(frozen=True, slots=True)
class Inquiry:
    """Asks for the decision log of the requests whose id begins so.

    An empty id asks for the log of workers and replicas.
    """

    request_id: str


@message(13)
@dataclass(frozen=True, slots=True)
class InquiryAnswer:
    """Answers an inquiry: lines for people, oldest first, and the state of the server."""

    incarnation: int
    lines: list[str]
    status: Status


@message(11)
@dataclass(frozen=True, slots=True)
class Detach:
    """Detaches requests whose client left. Those with `SchedulingOptions.resume` go on, the others are cancelled."""

    handles: I32
