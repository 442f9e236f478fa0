"""Log probabilities of one output token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass
class LogProbabilities:
    """Natural logarithms, one entry a position; there is more than one position only when a prompt is echoed.

    `top_log_probabilities` maps the most probable token ids of a position to theirs.
    """

    __tagged__: ClassVar[bool] = True

    token_log_probabilities: list[float]
    top_log_probabilities: list[dict[int, float]]
