"""What the operator allows, and what is refused because it would be more."""

from __future__ import annotations

from dataclasses import dataclass

from interfaces import TextContext
from scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True)
class Limits:
    """What the operator allows; None leaves `max_model_len` to the workers."""

    max_running: int
    max_batch_tokens: int
    max_queued: int
    max_model_len: int | None
    steps_in_flight: int
    prefix_cache: bool
    repeats: int = 0
    """How often a worker may do a step of decode rows again before it needs another message."""
    max_queued_tokens: int = 2**62
    max_open_per_tenant: int = 2**62
    stall_seconds: float = 15.0
    """What a step may take in any case; more is learnt from the steps that were."""

    def refusal(self, waiting: WaitingQueue, context: TextContext, open_of_tenant: int) -> str | None:
        """Why one more request is too many, or None. Its tenant has so many open ones."""
        if len(waiting) >= self.max_queued:
            return f"{len(waiting)} requests wait already; retry when some have finished"
        if len(waiting) and waiting.tokens + len(context.tokens) > self.max_queued_tokens:
            return f"requests of {waiting.tokens} tokens wait already; retry when some have ended"
        if open_of_tenant >= self.max_open_per_tenant:
            most = self.max_open_per_tenant
            return f"{most} requests of this key are open, which is its limit; retry when one has ended"
        return None
