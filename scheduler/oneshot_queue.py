"""The order in which texts of one-shot requests get into batches, and how a batch is cut.

A higher priority goes first. Within one priority tenants (API keys) share by weighted deficit round robin over tokens,
as they do for sequences. The requests of one tenant take turns: each has a tag in the virtual time of its queue, which
grows by the tokens it was served, while the time itself grows by the tokens of all, divided by their number. A new
request starts at the present time, so a short one is served next, however long the others are, and a long one still
gets its part when short ones keep coming.

A request whose waiting texts fit a batch is taken whole. Longer ones get a batch in pieces, and no such piece is put
behind the last texts of another request: that request's client would wait for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from scheduler.adapter import Adapter
from scheduler.oneshot_request import OneShotRequest, Piece

# Tokens that a long request gets at a time beside others.
QUANTUM_TOKENS = 512

# Tag, tokens that wait, and order of arrival: the least is served next.
_Entry = tuple[float, int, int, OneShotRequest]


class _Level:
    """The requests of one tenant, priority and kind that have texts waiting."""

    def __init__(self) -> None:
        self.heap: list[_Entry] = []
        self.time = 0.0
        self.count = 0

    def push(self, request: OneShotRequest) -> None:
        request.queued = True
        self.count += 1
        heapq.heappush(self.heap, (request.tag, request.waiting_tokens, request.order, request))

    def pop(self) -> None:
        heapq.heappop(self.heap)[3].queued = False
        self.count -= 1

    def drop_ended(self) -> None:
        """Count one request less. Its entry goes with others, when they are as many as those that wait."""
        self.count -= 1
        if len(self.heap) > 2 * self.count + 16:
            self.heap = [entry for entry in self.heap if not entry[3].ended]
            heapq.heapify(self.heap)

    def prune(self) -> None:
        """Drop requests that have ended from the top."""
        while self.heap and self.heap[0][3].ended:
            heapq.heappop(self.heap)


class _Tenant:
    def __init__(self, served: float) -> None:
        # Its tokens so far, divided by its weight.
        self.served = served
        # By priority and kind.
        self.levels: dict[tuple[int, str], _Level] = {}


class OneShotQueue:
    """The one-shot requests with texts in no batch."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._level = 0.0

    def __len__(self) -> int:
        return sum(level.count for tenant in self._tenants.values() for level in tenant.levels.values())

    def __iter__(self) -> Iterator[OneShotRequest]:
        for tenant in self._tenants.values():
            for level in tenant.levels.values():
                yield from (entry[3] for entry in level.heap if not entry[3].ended)

    def add(self, request: OneShotRequest) -> None:
        """Queue a request. One that was here before is served no later than a new one."""
        if request.queued:
            return
        tenant = self._tenants.setdefault(request.scheduling.tenant, _Tenant(self._level))
        if not tenant.levels:
            tenant.served = max(tenant.served, self._level)
        level = tenant.levels.setdefault(_key(request), _Level())
        # The time of a level begins anew when it was empty, so an old tag may lie far ahead.
        request.tag = min(request.tag, level.time) if request.batches else level.time
        level.push(request)

    def discard(self, request: OneShotRequest) -> None:
        """Take out a request that has ended."""
        if request.queued:
            request.queued = False
            self._tenants[request.scheduling.tenant].levels[_key(request)].drop_ended()

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters for which texts wait: the highest priority first, then the first of their requests to come."""
        firsts: dict[Adapter, tuple[int, int]] = {}
        for tenant in self._tenants.values():
            for (priority, _), level in tenant.levels.items():
                level.prune()
                if level.heap and (adapter := level.heap[0][3].adapter) is not None:
                    order = -priority, level.heap[0][2]
                    firsts[adapter] = min(order, firsts.get(adapter, order))
        return sorted(firsts, key=lambda adapter: firsts[adapter])

    def next_is_isolated(self, kinds: Collection[str]) -> bool:
        """Whether the next batch for a worker that can do these kinds is a text that must be alone."""
        level = self._next(kinds)
        return level is not None and level.heap[0][3].next_is_isolated

    def cut(self, budget: int, kinds: Collection[str]) -> list[Piece]:
        """Take the pieces of the next batch, of `budget` tokens or one longer text, for a worker of these kinds.

        A text that must be alone comes alone. Texts of the lowest priority join no others, whose answers would come
        later.
        """
        pieces: list[Piece] = []
        left = budget
        ends_one = False
        while (level := self._next(kinds)) is not None:
            request = level.heap[0][3]
            if pieces and request.scheduling.in_background and not pieces[0].request.scheduling.in_background:
                break
            whole = request.waiting_tokens <= left
            if pieces and (request.next_tokens > left or request.next_is_isolated or (ends_one and not whole)):
                break
            piece = self._serve(level, left if whole else min(left, QUANTUM_TOKENS))
            left -= piece.tokens
            ends_one = ends_one or not request.waiting
            if pieces and pieces[-1].request is request and pieces[-1].end == piece.first:
                pieces[-1].end = piece.end
            else:
                pieces.append(piece)
            if piece.isolated or left <= 0:
                break
        return pieces

    def _serve(self, level: _Level, most: int) -> Piece:
        """Take a piece of the first request of a level, and charge its tokens."""
        request = level.heap[0][3]
        active = level.count
        level.pop()
        piece = request.take(most)
        tenant = self._tenants[request.scheduling.tenant]
        self._level = tenant.served
        tenant.served += piece.tokens / request.scheduling.weight
        level.time += piece.tokens / active
        request.tag += piece.tokens
        if request.waiting:
            level.push(request)
        return piece

    def _next(self, kinds: Collection[str]) -> _Level | None:
        """The level whose first request is served next; None when none of these kinds waits."""
        best: tuple[int, float, int] | None = None
        chosen: _Level | None = None
        for tenant in self._tenants.values():
            for (priority, kind), level in list(tenant.levels.items()):
                level.prune()
                if not level.heap:
                    del tenant.levels[priority, kind]
                    continue
                key = (-priority, tenant.served, level.heap[0][2])
                if kind in kinds and (best is None or key < best):
                    best = key
                    chosen = level
        return chosen


def _key(request: OneShotRequest) -> tuple[int, str]:
    return request.scheduling.priority, request.kind
