"""The requests that wait, their order, and the refusal of those that can never run.

Requests that ran already (preempted, or their worker was lost) go first, oldest first, but those of the lowest priority
only before others of theirs. The others go by priority.
Within one priority tenants (API keys) share by weighted deficit round robin over tokens: the tenant that was served the
fewest tokens, divided by its weight, is next. The requests of one tenant keep the order of their arrival. A tenant that
comes back after a pause starts level with the others: the pause earns it nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from interfaces import LOWEST_PRIORITY, ErrorCode, RequestError, TextAndVisionContext, TextContext
from scheduler.sequence import Sequence


@dataclass(slots=True)
class _Tenant:
    # Its tokens so far, divided by its weight.
    served: float = 0.0
    # Its waiting requests by priority, oldest first.
    queues: dict[int, list[Sequence]] = field(default_factory=dict)


class WaitingQueue:
    """The waiting sequences, in the order in which they are placed."""

    def __init__(self) -> None:
        self._returning: list[Sequence] = []
        # Those of the lowest priority among them.
        self._returning_last: list[Sequence] = []
        self._tenants: dict[str, _Tenant] = {}
        self._level = 0.0
        self._count = 0
        # Tokens of all waiting sequences.
        self.tokens = 0
        # Those of the lowest priority: their number, and their tokens.
        self.background = 0
        self.background_tokens = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returning
        yield from self._returning_last
        for tenant in self._tenants.values():
            for queue in tenant.queues.values():
                yield from queue

    def add(self, sequence: Sequence) -> None:
        queue = self._queue_of(sequence)
        if queue is None:
            queue = self._open_queue(sequence)
        bisect.insort(queue, sequence, key=_order)
        self._count_in(sequence, 1)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out. Nothing happens if it does not wait."""
        queue = self._queue_of(sequence)
        i = bisect.bisect_left(queue, sequence.order, key=_order) if queue else 0
        if queue and i < len(queue) and queue[i] is sequence:
            self._take(queue, i)

    @property
    def returning(self) -> int:
        """The number of sequences that ran before."""
        return len(self._returning) + len(self._returning_last)

    def take_while(self, placed: Callable[[Sequence], bool], only_returning: bool = False) -> None:
        """Offer the next sequence to `placed` until it returns False. No sequence overtakes, so none starves."""
        while (queue := self._next_queue(only_returning)) is not None:
            sequence = queue[0]
            # `placed` may change `returning`, by which a sequence's queue is found. The queue is therefore kept here.
            if not placed(sequence):
                return
            if not self._has_returned(queue):
                self._level = self._tenants[sequence.scheduling.tenant].served
            self._take(queue, 0)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens of a prompt or an answer that the tenant of `sequence` was served."""
        tenant = self._tenants.get(sequence.scheduling.tenant)
        if tenant is not None:
            tenant.served += tokens / sequence.scheduling.weight

    def _next_queue(self, only_returning: bool) -> list[Sequence] | None:
        if self._returning or only_returning:
            return self._returning or self._returning_last or None
        best: tuple[int, float, int] | None = None
        chosen = None
        for tenant in self._tenants.values():
            for priority, queue in tenant.queues.items():
                if queue and (best is None or (-priority, tenant.served, queue[0].order) < best):
                    best = (-priority, tenant.served, queue[0].order)
                    chosen = queue
        if self._returning_last and (best is None or -best[0] <= LOWEST_PRIORITY):
            return self._returning_last
        return chosen

    def _has_returned(self, queue: list[Sequence]) -> bool:
        return queue is self._returning or queue is self._returning_last

    def _queue_of(self, sequence: Sequence) -> list[Sequence] | None:
        if sequence.returning:
            return self._returning_last if sequence.background else self._returning
        tenant = self._tenants.get(sequence.scheduling.tenant)
        return tenant.queues.get(sequence.scheduling.priority) if tenant else None

    def _open_queue(self, sequence: Sequence) -> list[Sequence]:
        tenant = self._tenants.setdefault(sequence.scheduling.tenant, _Tenant())
        if not tenant.queues:
            tenant.served = max(tenant.served, self._level)
        return tenant.queues.setdefault(sequence.scheduling.priority, [])

    def _count_in(self, sequence: Sequence, number: int) -> None:
        tokens = number * len(sequence.tokens)
        self._count += number
        self.tokens += tokens
        if sequence.background:
            self.background += number
            self.background_tokens += tokens

    def _take(self, queue: list[Sequence], i: int) -> None:
        sequence = queue.pop(i)
        self._count_in(sequence, -1)
        if not queue and not self._has_returned(queue):
            del self._tenants[sequence.scheduling.tenant].queues[sequence.scheduling.priority]


def refusal(
    context: TextContext, max_model_len: int, vocab_size: int, hidden_size: int, takes_images: bool = False
) -> RequestError | None:
    """Why a request can never run, or None.

    The API checks the same before it submits. Another sender of messages may not have checked.
    """
    tokens = context.tokens.all
    prompt = context.prompt_length
    if isinstance(context, TextAndVisionContext) and takes_images:
        # Placeholders may lie outside: their embeddings are replaced.
        tokens = tokens[~np.isin(tokens, context.vision_token_ids)]
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        return RequestError(ErrorCode.INVALID, f"token ids must be between 0 and {vocab_size - 1}")
    if prompt >= max_model_len:
        return RequestError(
            ErrorCode.TOO_LONG,
            f"the prompt has {prompt} tokens; {max_model_len} are possible, the answer's included",
        )
    given = context.prompt_embeddings
    if given is not None and (given.shape[1] != hidden_size or not np.isfinite(given).all()):
        return RequestError(ErrorCode.INVALID, f"embeddings must be vectors of {hidden_size} finite numbers")
    return None


def _order(sequence: Sequence) -> int:
    return sequence.order
