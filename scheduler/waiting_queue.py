"""Who may wait, in which order, and what is refused at the door.

Requests that ran already (preempted, or their worker was lost) go first, oldest first. The others are taken by
priority, and within one priority their tenants (API keys) take turns by weighted deficit round robin over tokens: each
time the one that was served the fewest tokens, divided by its weight, is next, and those of one tenant come in the
order of their arrival. A tenant that comes back after a pause starts level with the others: it has saved nothing up.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from interfaces import ErrorCode, RequestError, TextContext
from scheduler.sequence import Sequence


@dataclass(slots=True)
class _Tenant:
    """`served` are its tokens so far divided by its weight; `lines` its waiting requests by priority, oldest first."""

    served: float = 0.0
    lines: dict[int, list[Sequence]] = field(default_factory=dict)


class WaitingQueue:
    """Waiting sequences, and whose turn it is."""

    def __init__(self) -> None:
        self._returning: list[Sequence] = []
        self._tenants: dict[str, _Tenant] = {}
        self._level = 0.0
        self._count = 0
        self.tokens = 0
        """Of all that wait, as they came."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returning
        for tenant in self._tenants.values():
            for line in tenant.lines.values():
                yield from line

    def add(self, sequence: Sequence) -> None:
        line = self._line_of(sequence)
        if line is None:
            line = self._open_line(sequence)
        bisect.insort(line, sequence, key=_order)
        self._count += 1
        self.tokens += len(sequence.tokens)

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out; nothing happens when it does not wait."""
        line = self._line_of(sequence)
        i = bisect.bisect_left(line, sequence.order, key=_order) if line else 0
        if line and i < len(line) and line[i] is sequence:
            self._take(line, i)

    def take_while(self, placed: Callable[[Sequence], bool]) -> None:
        """Offers the next to `placed` until it says False: nobody overtakes, so nobody starves."""
        while (line := self._next_line()) is not None:
            sequence = line[0]
            # Whether it ran before is about to change, and with it the line in which it is looked for.
            if not placed(sequence):
                return
            if line is not self._returning:
                self._level = self._tenants[sequence.terms.tenant].served
            self._take(line, 0)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """`sequence` has been served so many tokens, of its prompt or its answer."""
        tenant = self._tenants.get(sequence.terms.tenant)
        if tenant is not None:
            tenant.served += tokens / sequence.terms.weight

    def _next_line(self) -> list[Sequence] | None:
        if self._returning:
            return self._returning
        best: tuple[int, float, int] | None = None
        chosen = None
        for tenant in self._tenants.values():
            for priority, line in tenant.lines.items():
                if line and (best is None or (-priority, tenant.served, line[0].order) < best):
                    best, chosen = (-priority, tenant.served, line[0].order), line
        return chosen

    def _line_of(self, sequence: Sequence) -> list[Sequence] | None:
        if sequence.returning:
            return self._returning
        tenant = self._tenants.get(sequence.terms.tenant)
        return tenant.lines.get(sequence.terms.priority) if tenant else None

    def _open_line(self, sequence: Sequence) -> list[Sequence]:
        tenant = self._tenants.setdefault(sequence.terms.tenant, _Tenant())
        if not tenant.lines:
            tenant.served = max(tenant.served, self._level)
        return tenant.lines.setdefault(sequence.terms.priority, [])

    def _take(self, line: list[Sequence], i: int) -> None:
        sequence = line.pop(i)
        self._count -= 1
        self.tokens -= len(sequence.tokens)
        if not line and line is not self._returning:
            del self._tenants[sequence.terms.tenant].lines[sequence.terms.priority]


def refusal(context: TextContext, max_model_len: int, vocab_size: int, hidden_size: int) -> RequestError | None:
    """Why a request can never run, or None. The API checks the same before it submits.

    A stranger's message may not have.
    """
    tokens, prompt = context.tokens.all, context.prompt_length
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return RequestError(ErrorCode.INVALID, f"token ids must be between 0 and {vocab_size - 1}")
    if prompt >= max_model_len:
        return RequestError(
            ErrorCode.TOO_LONG,
            f"the prompt has {prompt} tokens; prompt and answer together may have {max_model_len}",
        )
    given = context.prompt_embeddings
    if given is not None and (given.shape[1] != hidden_size or not np.isfinite(given).all()):
        return RequestError(ErrorCode.INVALID, f"embeddings must be vectors of {hidden_size} finite numbers")
    return None


def _order(sequence: Sequence) -> int:
    return sequence.order
