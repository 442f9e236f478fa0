"""The operator's limits, and the refusal of requests beyond them."""

from __future__ import annotations

from dataclasses import dataclass

from interfaces import TextContext
from scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True)
class Limits:
    """The operator's limits."""

    max_running: int
    max_batch_tokens: int
    max_queued: int
    # None leaves the length to the workers.
    max_model_len: int | None
    steps_in_flight: int
    prefix_cache: bool
    # Steps that a worker may repeat by itself after a step of decode rows.
    repeats: int = 0
    max_queued_tokens: int = 2**62
    max_open_per_tenant: int = 2**62
    # Seconds that any step may take. More is learnt from the steps before.
    stall_seconds: float = 15.0

    def refusal(self, waiting: WaitingQueue, context: TextContext, open_of_tenant: int) -> str | None:
        """Why one more request is too many, or None. Its tenant has `open_of_tenant` open requests."""
        if len(waiting) >= self.max_queued:
            return f"{len(waiting)} requests wait already; retry when some have finished"
        if len(waiting) and waiting.tokens + len(context.tokens) > self.max_queued_tokens:
            return f"requests of {waiting.tokens} tokens wait already; retry when some have ended"
        if open_of_tenant >= self.max_open_per_tenant:
            most = self.max_open_per_tenant
            return f"{most} requests of this key are open, which is its limit; retry when one has ended"
        return None
