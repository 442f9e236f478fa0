"""The operator's limits, and the refusal of requests beyond them."""

from __future__ import annotations

from dataclasses import dataclass

from interfaces import WorkerHello
from shared.setting_forms import STEP_TOKENS

# Tokens of texts in one batch, where the operator sets no other number. On a CPU larger batches gain nothing.
CPU_TEXT_TOKENS = 4096
GPU_TEXT_TOKENS = 16384
# Fewest tokens for which a sequence waits until another row has computed them. It waits for a step at least, and a step
# takes about as long as this number of tokens takes.
MIN_AWAITED_TOKENS = 128


@dataclass(frozen=True)
class Limits:
    """The operator's limits."""

    # None leaves them to the workers, each of which has sized its memory for so many.
    max_running: int | None
    max_batch_tokens: int | None
    max_queued: int
    # None leaves the length to the workers.
    max_model_len: int | None
    steps_in_flight: int
    prefix_cache: bool
    # Tokens that a worker may guess in a step, and that need blocks ahead of their time.
    most_guesses: int = 0
    max_queued_tokens: int = 2**62
    max_open_per_tenant: int = 2**62
    # Seconds that any step may take. More is learnt from the steps before.
    stall_seconds: float = 15.0
    # The most tokens of texts in one batch; None leaves it to the device.
    max_text_tokens: int | None = None
    # Fewest tokens for which a sequence waits until another row of its worker has computed them.
    min_awaited_tokens: int = MIN_AWAITED_TOKENS

    @property
    def of_worker(self) -> tuple[int | None, bool, float, int]:
        """Those of a single worker, in the order in which `Worker` takes them."""
        return self.max_running, self.prefix_cache, self.stall_seconds, self.min_awaited_tokens

    def step_tokens(self, hello: WorkerHello) -> int:
        """The most tokens of a step of the worker with this hello."""
        own = hello.step_tokens or STEP_TOKENS
        return min(own, self.max_batch_tokens or own)

    def text_batch_tokens(self, device: str) -> int:
        """The most tokens of texts in one batch on a device, such as "cpu", or "cpu+cpu" for a group of ranks."""
        return self.max_text_tokens or (CPU_TEXT_TOKENS if device.startswith("cpu") else GPU_TEXT_TOKENS)

    def refusal(self, waiting: int, waiting_tokens: int, tokens: int, open_of_tenant: int) -> str | None:
        """Why one more request, of `tokens` tokens, is too many, or None.

        So many requests with so many tokens wait, and its tenant has `open_of_tenant` open requests.
        """
        if waiting >= self.max_queued:
            return f"{waiting} requests wait already; retry when some have finished"
        if waiting and waiting_tokens + tokens > self.max_queued_tokens:
            return f"requests of {waiting_tokens} tokens wait already; retry when some have ended"
        if open_of_tenant >= self.max_open_per_tenant:
            most = self.max_open_per_tenant
            return f"{most} requests of this key are open, which is its limit; retry when one has ended"
        return None
