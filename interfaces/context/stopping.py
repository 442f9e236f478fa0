"""The end of a sequence: by one token, by a sequence of tokens, by a text.

The tracker judges; which part of the end is shown or withheld is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr

from interfaces.context.tokens import TokenSlice

if TYPE_CHECKING:
    TokenSequences = Sequence[Sequence[int]]
    Strings = Sequence[str]
else:
    # Whatever is given, a tuple is kept, so that a tracker equals its copy from the wire.
    TokenSequences = tuple[tuple[StrictInt, ...], ...]
    Strings = tuple[StrictStr, ...]


class EOSTracker(BaseModel):
    """End rules of one request, and the end of its text so far, which travels along."""

    model_config = ConfigDict(extra="forbid")

    eos_token_ids: set[StrictInt] = set()
    eos_sequences: TokenSequences = ()
    eos_stop_strings: Strings = ()
    # The text in which a stop string may still begin.
    text_tail: StrictStr = ""

    def is_eos_from_tokens(self, generated_tokens: TokenSlice) -> bool:
        """Whether the last token, or the last few, end the sequence. The prompt must not be among the tokens."""
        if not len(generated_tokens):
            raise ValueError("generated_tokens is empty: there is no last token to judge")
        if int(generated_tokens[-1]) in self.eos_token_ids:
            return True
        return any(_ends_with(generated_tokens, sequence) for sequence in self.eos_sequences)

    def first_eos_offset(self, prior: TokenSlice, new: TokenSlice) -> int | None:
        """Return the index of the first of the `new` tokens that ends the sequence which `prior` began."""
        reach = max((len(sequence) for sequence in self.eos_sequences), default=1) - 1
        before = prior[max(0, len(prior) - reach) :]
        tokens = np.concatenate([before, new])
        for i in range(len(new)):
            if self.is_eos_from_tokens(tokens[: len(before) + i + 1]):
                return i
        return None

    def is_eos_from_string(self, next_token_decoded: str) -> str | None:
        """Return the stop string that this text completes: the one that begins first, of those the longest.

        A match is cut off together with the text before it, so that it is reported once; the text behind it is searched
        in the next call.
        """
        stops = [stop for stop in self.eos_stop_strings if stop]
        if not stops:
            return None
        text = self.text_tail + next_token_decoded
        found = [(position, -len(stop), stop) for stop in stops if (position := text.find(stop)) >= 0]
        if found:
            position, _, stop = min(found)
            self.text_tail = text[position + len(stop) :]
            return stop
        longest = max(map(len, stops))
        self.text_tail = text[-(longest - 1) :] if longest > 1 else ""
        return None


def _ends_with(tokens: TokenSlice, sequence: Sequence[int]) -> bool:
    count = len(sequence)
    return 0 < count <= len(tokens) and tokens[-count:].tolist() == list(sequence)
