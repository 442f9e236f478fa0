"""Log probabilities of one output token, or of the tokens of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class LogProbabilities:
    """Natural logarithms, one entry a position; there is more than one position only when a prompt is echoed.

    `top_log_probabilities` maps the most probable token ids of a position to their logarithms, most probable first;
    `asked_log_probabilities` does so for the ids that the request named, in its order, and is empty when it named none.
    """

    __tagged__: ClassVar[bool] = True

    token_log_probabilities: list[float]
    top_log_probabilities: list[dict[int, float]]
    asked_log_probabilities: list[dict[int, float]] = field(default_factory=list)
