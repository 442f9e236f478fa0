"""What one request looked like from the client: when it was sent, when each chunk of text came, how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

COMPLETED = "completed"
CUT_OFF = "not finished"
"""The run ended before the request did."""


@dataclass
class Timeline:
    """Times are seconds of one monotonic clock.

    `chunks` holds the arrival of every chunk with text; role-only, empty and usage chunks are not in it. Token counts
    are the server's own `usage`. `outcome` is COMPLETED or a short name of the failure, such as "HTTP 429".
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    outcome: str = CUT_OFF
    # The beginning of what a server said that refused the request.
    detail: str = ""

    @property
    def completed(self) -> bool:
        return self.outcome == COMPLETED

    @property
    def latency(self) -> float:
        """E2EL."""
        return self.ended - self.sent

    @property
    def first_token(self) -> float | None:
        """TTFT; None for an output without any text."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def gaps(self) -> list[float]:
        """ITL samples."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def per_output_token(self) -> float | None:
        """TPOT; None for outputs of a single token, which have no second token to wait for."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.latency - self.first_token) / (self.output_tokens - 1)
