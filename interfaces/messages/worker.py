"""Messages between the scheduler and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from interfaces.context.codec_windows import ClipContext, CodecContext, CodecFacts
from interfaces.context.grammar_state import GrammarState
from interfaces.context.images import ImageMetadata
from interfaces.context.pooling import PoolingContext
from interfaces.context.synthesis import SynthesisContext
from interfaces.context.text import TextContext
from interfaces.messages.hidden_states import HiddenStates
from interfaces.messages.logprob_reports import LogprobReports
from interfaces.messages.token_runs import TokenRuns
from interfaces.request.sampling import SamplingParams
from interfaces.result.pooled_values import PooledValues
from interfaces.wire.codec import F32, I32, I64, F32Matrix, I32x3, message

# The task of a worker that generates tokens. The others are values of `PoolingTask`.
GENERATE = "generate"

# Values of `WorkerHello.images`.
NO_IMAGES = 0
CUT_IMAGES = 1
WHOLE_IMAGES = 2
WHOLE_PROMPTS = 3

# A supervisor numbers the starts of a worker from a multiple of this on, which is its own: 0 on the scheduler's
# machine, a random one elsewhere.
EPOCHS_OF_A_SUPERVISOR = 2**20

# Epoch of a worker of another machine that the scheduler has not given one.
UNREGISTERED = -1


@message(16)
@dataclass(frozen=True, slots=True)
class WorkerHello:
    """Registers a worker with its capacity, and is its heartbeat every second.

    `epoch` counts the starts of this worker slot by its supervisor (`EPOCHS_OF_A_SUPERVISOR`). `max_model_len` is what
    the model and the KV memory allow for one sequence, in tokens. A step has at most `max_rows` sequences and
    `step_tokens` tokens, for which it has memory; 0 tokens: as many as a CPU's. `drafted` and `accepted` count
    its draft tokens, and those accepted, since it started; `drafts` the rows of passes that had some, and `accepted_at`
    the accepted ones by depth. `backend` describes in words what runs the model. `tasks` are GENERATE or values
    of `PoolingTask`; a worker that only pools has no blocks and no rows, its `hidden_size` is the width of its vectors,
    and `labels` names those of a classifier. `images` is NO_IMAGES, CUT_IMAGES (a step may compute a part of an image),
    WHOLE_IMAGES, or WHOLE_PROMPTS (all tokens of a prompt with images see each other). It has `encoded` images in
    `encode_ms` milliseconds, and found the features of `image_hits` others. Its adapters may take `adapter_memory`
    bytes; 0: it takes none. `row_invariant`: a row gets the same bits whatever else is in its pass, and however its
    prompt is cut. `processors` are the schemas of its logits processors' parameters, as JSON text, by name. `guesses`:
    it uses room for guesses (`Step.ahead`). It computes with version number `weights` of its model. It is a group of so
    many `ranks`, whose weights and memory stay as they are where that is more than 1.

    A worker of another machine has a `name` of its own, and asks for an index and an epoch with UNREGISTERED as its
    epoch; its `index` is then the one that it wants, or below 0. `facts` are what must be equal in all workers of a
    scheduler, in words, by the name of the field. `codec` describes what turns the model's speech tokens into sound.
    Workers with an equal `kv_form` can use the bytes of each other's blocks, `block_bytes` each; empty: none can.
    Unless it `reuses_prefixes`, its rows have a state beside their blocks: each row computes all of its tokens itself.
    """

    device: str
    index: int
    epoch: int
    pid: int
    num_blocks: int
    block_size: int
    max_rows: int
    max_model_len: int
    vocab_size: int
    architecture: str
    dtype: str
    attention: str
    hidden_size: int = 0
    drafted: int = 0
    accepted: int = 0
    backend: str = ""
    tasks: list[str] = field(default_factory=lambda: [GENERATE])
    labels: list[str] = field(default_factory=list)
    images: int = NO_IMAGES
    encoded: int = 0
    image_hits: int = 0
    encode_ms: int = 0
    adapter_memory: int = 0
    row_invariant: bool = False
    processors: dict[str, str] = field(default_factory=dict)
    guesses: bool = False
    drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)
    weights: int = 0
    name: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    codec: CodecFacts | None = None
    spill_slots: int = 0
    spill_place: str = ""
    kv_form: str = ""
    block_bytes: int = 0
    reuses_prefixes: bool = True
    step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RowGrammar:
    """The grammar of the answer in a row: compiled, with the place where it begins, and the tokens that may end it.

    The state is that of the answer's first token, whatever has been emitted.
    """

    text: str
    state: GrammarState
    ends: list[int]

    @classmethod
    def of(cls, context: TextContext) -> RowGrammar | None:
        """Make a row's grammar from its context; None for free text."""
        if context.grammar is None:
            return None
        return cls(context.grammar, context.grammar_state, sorted(context.eos_token_ids))


@dataclass(frozen=True, slots=True)
class Join:
    """Puts a sequence into row `row`, with everything that the worker must know of it.

    `tokens` are all known tokens, prompt first; those from `prompt_len` on were emitted before (a replay or a
    preemption). `start` counts the leading tokens whose K/V is already in the blocks (prefix cache). Blocks come in
    `Step.new_blocks`. Log-probabilities of the prompt are wanted from index `report_from` on, hidden states of all
    tokens from index `hidden_from` on; None: no more. `embeddings` stand for those of the first tokens.
    `images` are all images of the prompt: those that end before `start` only count for positions. `isolated`: it shares
    no forward pass. `adapter` is the handle of its adapter, 0 for the base model; it is loaded before the row's first
    token is computed. Guesses at its answer may come from answers of sequences with the same `salt`.
    """

    row: int
    tokens: I32
    prompt_len: int
    start: int
    sampling: SamplingParams
    report_from: int | None = None
    images: list[ImageMetadata] = field(default_factory=list)
    hidden_from: int | None = None
    embeddings: F32Matrix | None = None
    grammar: RowGrammar | None = None
    isolated: bool = False
    adapter: int = 0
    salt: str = ""


@message(17)
@dataclass(slots=True)
class Step:
    """One forward pass on one worker.

    Order of effects: `save`, `load`, `drop`, `joins`, `new_blocks`, then the forward over `rows`.

    Row rows[i] computes its next ntok[i] tokens (1 each when `ntok` is None). A row whose known tokens are all computed
    then samples one more. `new_blocks` are triples (row, index in the row's block table, block). `incarnation` names
    the scheduler process; a worker that sees a new one forgets all rows first.

    `ahead[i]` further positions of row rows[i] have blocks: the worker may fill them with guesses at the tokens that
    follow (None: none).

    `save` are triples (block, slot, 0): what the block holds before this step is kept in the slot beside the KV cache.
    `load` are triples (ticket, slot, block): the block gets what the slot has, some time after this step has begun. The
    triples of a ticket are consecutive, and no row has its blocks before `KvMoved` has answered it.
    """

    incarnation: int
    epoch: int
    step: int
    rows: I32
    ntok: I32 | None
    new_blocks: I32x3
    drop: I32
    joins: list[Join]
    ahead: I32 | None = None
    save: I32x3 | None = None
    load: I32x3 | None = None


@message(18)
@dataclass(slots=True)
class StepResult:
    """The result of a Step: `tokens[i]` was sampled for `rows[i]`; rows in mid-prefill are absent, the others in order.

    `errors` maps a row to the reason why it alone failed; such rows are absent from `rows`. `device_us` is the time of
    the pass in microseconds. `forced` are jump-forward tokens of rows: the worker knows them, and samples the row again
    when they are computed, so a step in flight that computes fewer gives it no token. `more` are guesses that were
    right: tokens after the sampled one, all but the last of which are computed; `more_logprobs` are theirs. Tokens of
    `forced` follow those of `more`. `guessed[i]` guesses were computed for `rows[i]`. `again` are rows of the step that
    have no token, since the worker has lost their states for want of memory: they must leave it, and may begin anew. It
    computes nothing more of them until they are dropped. One that is in `errors`, too, has failed alone: it may begin
    anew where that is the first time.
    """

    incarnation: int
    epoch: int
    index: int
    step: int
    rows: I32
    tokens: I32
    logprobs: F32 | None
    errors: dict[int, str]
    device_us: int
    reports: LogprobReports | None = None
    hidden: HiddenStates | None = None
    forced: TokenRuns | None = None
    more: TokenRuns | None = None
    more_logprobs: F32 | None = None
    guessed: I32 | None = None
    again: I32 | None = None


@message(23)
@dataclass(slots=True)
class Ready:
    """Reports images that are encoded: row rows[i] may compute its tokens before upto[i].

    `joined[i]` is the number of the step in which that row joined, because the row may belong to another sequence by
    now. `errors` maps a row to the reason why its images cannot be encoded: its sequence fails. `seconds[i]` is the
    time that encoding for rows[i] has taken; 0 where the features of all its images were kept. None: 0 for all.
    """

    incarnation: int
    epoch: int
    index: int
    rows: I32
    joined: I64
    upto: I32
    errors: dict[int, str]
    seconds: F32 | None = None


@message(21)
@dataclass(slots=True)
class Batch:
    """Texts that one worker computes between two steps: parts of one or more one-shot requests.

    Parts with equal options may be computed together. A worker answers batches and steps in the order in which they
    came, but for a batch of a clip, which it computes beside them. Batches have numbers of their own.
    """

    incarnation: int
    epoch: int
    number: int
    parts: list[PoolingContext | SynthesisContext | CodecContext | ClipContext]


@message(22)
@dataclass(slots=True)
class BatchResult:
    """The result of a Batch: the values of each of its parts, None for a part that alone failed.

    `errors` maps the index of such a part to the reason. `device_us` is the time of the batch in microseconds. Large
    values stand in shared memory: the segment is removed by the replica that reads them, and some time later by the
    worker that made it.
    """

    incarnation: int
    epoch: int
    index: int
    number: int
    parts: list[PooledValues | None]
    errors: dict[int, str]
    device_us: int


@message(19)
@dataclass(frozen=True, slots=True)
class Retire:
    """Fences a worker off: the scheduler has given it up and its sequences to others.

    The worker must end, and may register again as a new epoch. `stays`: it was only cut off, so it need not end.
    """

    epoch: int
    reason: str
    stays: bool = False


@message(20)
@dataclass(frozen=True, slots=True)
class WorkerGoodbye:
    """Ends a worker in order, all its steps answered: its sequences go elsewhere and none of them is to blame.

    With a `reason` it cannot go on, and steps may be unanswered. If `blamed`, one of their sequences may be to blame.
    """

    index: int
    epoch: int
    reason: str = ""
    blamed: bool = True


@message(34)
@dataclass(frozen=True, slots=True)
class Ping:
    """Shows a worker of another machine, twice a second, that its scheduler is there and reaches it."""

    incarnation: int


@message(35)
@dataclass(frozen=True, slots=True)
class Welcome:
    """Gives the worker called `name` its index and its epoch, under which it registers."""

    name: str
    index: int
    epoch: int


@message(36)
@dataclass(frozen=True, slots=True)
class Refusal:
    """Refuses the worker called `name`: it serves something else than the others, and the reason has both values.

    `waits`: the others may go, for they are on other machines, too. So it asks again.
    """

    name: str
    reason: str
    waits: bool = False
