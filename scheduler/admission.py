"""Who may wait, in which order, and what is refused at the door."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

import numpy as np

from interfaces import ErrorCode, RequestError, Submit
from scheduler.sequence import Sequence


class WaitingLine:
    """Waiting sequences, oldest first; one that was preempted returns to the place its age gives it."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._line, sequence, key=_order)

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out; nothing happens when it does not wait."""
        i = bisect.bisect_left(self._line, sequence.order, key=_order)
        if i < len(self._line) and self._line[i] is sequence:
            del self._line[i]

    def take_while(self, placed: Callable[[Sequence], bool]) -> None:
        """Offers the oldest to `placed` until it says False: nobody overtakes, so nobody starves."""
        count = 0
        for sequence in self._line:
            if not placed(sequence):
                break
            count += 1
        del self._line[:count]


def refusal(submit: Submit, max_model_len: int, vocab_size: int, hidden_size: int) -> RequestError | None:
    """Why a request can never run, or None. The API checks the same before it submits.

    A stranger's message may not have.
    """
    tokens, prompt = submit.context.tokens.all, submit.context.prompt_length
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return RequestError(ErrorCode.INVALID, f"token ids must be between 0 and {vocab_size - 1}")
    if prompt >= max_model_len:
        return RequestError(
            ErrorCode.TOO_LONG,
            f"the prompt has {prompt} tokens; prompt and answer together may have {max_model_len}",
        )
    given = submit.context.prompt_embeddings
    if given is not None and (given.shape[1] != hidden_size or not np.isfinite(given).all()):
        return RequestError(ErrorCode.INVALID, f"embeddings must be vectors of {hidden_size} finite numbers")
    return None


def _order(sequence: Sequence) -> int:
    return sequence.order
