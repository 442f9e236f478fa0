"""From a `TextGenerationRequest` to text: the one path that every dialect's generation takes.

    generation = await generate(server, requests)     # raises RequestFailed: nothing has been sent to the client yet
    async for delta in generation: ...                 # TextDelta after TextDelta, of all choices, interleaved
    answers = await generation.collect()               # or: run to the end, then read generation.choices

Contract (for the dialects):

- `generate` takes one request or several (a batch). Choice k of request r has the flat index `sum(n of requests
  before r) + k`; `generation.choices[index]` holds its facts, which grow with the deltas and are final when
  `choice.finish` is set.
- It returns once the first delta is there, so that every error known before it has a real HTTP status. A request that
  waits longer than `SILENCE_BEFORE_HEADERS` is handed over all the same (the stream then sends keep-alives); an error
  after that is raised by the iteration and belongs into the stream.
- The iteration ends when every choice has finished. It raises RequestFailed when one failed; the others are cancelled.
- `close()` cancels whatever still runs, in the scheduler too. It is idempotent, and `collect` and a cancelled
  `generate` call it themselves; whoever iterates must call it (`EventStream(frames, generation.close)` does).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from api_server.state import ServerState
from interfaces.requests import TextGenerationRequest
from interfaces.sampling import SamplingParams

SILENCE_BEFORE_HEADERS = 10.0


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. `matched` is the stop token's id or the stop string; None for the other kinds."""

    kind: Literal["stop_token", "stop_string", "length", "cancelled"]
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One generated token. `text` is what this token added to the text, special tokens included.

    `logprob` is None unless `sampling.logprobs` asked for it.
    """

    id: int
    text: str
    logprob: float | None
    special: bool


@dataclass(frozen=True, slots=True)
class TextDelta:
    """News of choice `index`: `text` to append (stop strings cut, never part of a character), perhaps empty.

    `tokens` is empty unless `token_details` was asked for; `count` tokens arrived with this delta in any case. Tokens
    whose text is still held back (an unfinished character, a possible stop string) are in the delta in which they
    arrived. `finish` is set in the last delta of a choice, and in no other.
    """

    index: int
    text: str
    count: int
    tokens: list[TokenDelta]
    finish: Finish | None


@dataclass
class Choice:
    """One answer to one prompt: the facts of which every dialect renders its frames. Times are `time.monotonic()`."""

    index: int
    request: TextGenerationRequest
    request_index: int
    """Position of `request` in the batch."""
    prompt_text: str | None
    """The prompt as text (after the chat template); None when it came as token ids."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """The values in force; `sampling.max_new_tokens` is the limit in force and `sampling.seed` the seed that was used."""

    token_ids: list[int] = field(default_factory=list)
    """Generated so far, with the stop token, up to the token that completed a stop string."""
    cached_tokens: int = 0
    finish: Finish | None = None
    logprob_sum: float = 0.0

    received: float = 0.0
    submitted: float = 0.0
    first_token: float | None = None
    last_token: float | None = None

    deltas: list[TextDelta] = field(default_factory=list)
    """Filled by `collect` only."""

    @property
    def text(self) -> str:
        """The text of all deltas so far (kept while iterating, too)."""

    @property
    def tokens(self) -> list[TokenDelta]:
        """The token details of all deltas (after `collect`)."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


async def generate(server: ServerState, requests: TextGenerationRequest | Sequence[TextGenerationRequest]) -> Generation:
    """Validates, tokenizes and submits; returns with the first delta at hand. Raises RequestFailed."""


class Generation:
    """The running answers to one HTTP request."""

    choices: list[Choice]

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    async def collect(self) -> list[Choice]:
        """Runs to the end and returns the choices, with `text` and `tokens` filled."""

    def close(self) -> None: ...
