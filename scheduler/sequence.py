"""One request as the scheduler holds it: enough to run it, to run it again elsewhere, and to answer for it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from interfaces import SamplingParams, Submit
from scheduler.prefix_cache import extend_hashes


@dataclass(eq=False, slots=True)
class Sequence:
    """Prompt and emitted tokens of a request, and where it runs.

    `order` is its place in the line: lower came first, and keeps it through preemptions. `tokens` holds the prompt and
    then every token the client has been sent. `row` is -1 while it waits.
    """

    replica: bytes
    handle: int
    request_id: str
    order: int
    tokens: array[int]
    prompt_len: int
    sampling: SamplingParams
    salt: str
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0

    @classmethod
    def of(cls, replica: bytes, submit: Submit, order: int) -> Sequence:
        tokens = array("i", submit.tokens.tobytes())
        tokens.frombytes(submit.emitted.tobytes())
        return cls(
            replica=replica,
            handle=submit.handle,
            request_id=submit.request_id,
            order=order,
            tokens=tokens,
            prompt_len=len(submit.tokens),
            sampling=submit.sampling,
            salt=submit.cache_salt,
        )

    @property
    def waiting(self) -> bool:
        return self.row < 0

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_len

    def limit(self, max_model_len: int) -> int:
        """Length in tokens, prompt included, at which the sequence ends."""
        wanted = self.sampling.max_new_tokens
        return max_model_len if wanted is None else min(max_model_len, self.prompt_len + wanted)

    def array(self) -> NDArray[np.int32]:
        """The tokens as a copy that later growth does not touch."""
        return np.array(self.tokens, dtype=np.int32)

    def prefix_hashes(self, block_size: int) -> list[bytes]:
        """Digests of all full blocks of the tokens known so far."""
        if len(self.tokens) // block_size > len(self.hashes):
            extend_hashes(self.hashes, self.array(), block_size, self.salt)
        return self.hashes
