"""Which requests a run sends: prompts of random token ids and lengths, as a function of the seed only.

Random ids share no prefix but the one that a workload may ask for, so a prefix cache finds nothing else between the
requests of a run; a run with the same seed on the same server would hit it, which is why repeated runs take consecutive
seeds. Knows nothing of HTTP or time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """`spread` 0 makes all requests equally long; 0.5 draws lengths evenly from half to 1.5 times the mean."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    spread: float
    seed: int
    first_token_id: int
    last_token_id: int
    shared_prefix: int = 0
    """Tokens with which every prompt begins, before `prompt_tokens` of its own."""
    prefix_seed: int = 0
    # Number of different such beginnings, which requests have in turns.
    prefixes: int = 1

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens", "output_tokens", "prefixes"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(0 <= self.spread < 1, "spread", self.spread, "at least 0 and below 1")
        _require(self.seed >= 0, "seed", self.seed, "at least 0")
        for name in ("shared_prefix", "prefix_seed"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        _require(
            0 <= self.first_token_id <= self.last_token_id, "first_token_id", self.first_token_id, "0 to last_token_id"
        )


@dataclass(frozen=True)
class PlannedRequest:
    """One request. `text` is sent instead of the token ids `prompt`, unless it is empty."""

    prompt: list[int]
    output_tokens: int
    text: str = ""


def plan(workload: Workload) -> list[PlannedRequest]:
    """The run's requests, in the order in which they are sent."""
    random = np.random.default_rng(workload.seed)
    prompts = _lengths(random, workload.prompt_tokens, workload)
    outputs = _lengths(random, workload.output_tokens, workload)
    ids = (workload.first_token_id, workload.last_token_id + 1)
    shape = (workload.prefixes, workload.shared_prefix)
    prefixes = np.random.default_rng(workload.prefix_seed).integers(*ids, size=shape).tolist()
    return [
        PlannedRequest(prefixes[i % workload.prefixes] + random.integers(*ids, size=prompt).tolist(), int(output))
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def _lengths(random: np.random.Generator, mean: int, workload: Workload) -> list[int]:
    low, high = round(mean * (1 - workload.spread)), round(mean * (1 + workload.spread))
    return [int(length) for length in random.integers(max(1, low), high + 1, size=workload.requests)]


def _require(holds: bool, name: str, value: object, valid: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {valid}, got {value!r}")
