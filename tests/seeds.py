"""Where the random inputs of the tests come from.

Each test draws from generators that are seeded by its name, so that what passed once passes again, alone or beside
others. TOKENYARD_TEST_SEED=random draws anew, and names the number with which a failure comes again;
TOKENYARD_TEST_SEED=NUMBER is that number.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any
from zlib import crc32

import numpy as np

_GIVEN = os.environ.get("TOKENYARD_TEST_SEED", "0")
SEED = random.randrange(1, 2**31) if _GIVEN == "random" else int(_GIVEN)
# What a hypothesis test draws follows from its source then.
DERANDOMIZED = SEED == 0

_usual_generator = np.random.default_rng
_sequence = np.random.SeedSequence(SEED)


def _generator(seed: Any = None) -> np.random.Generator:
    return _usual_generator(_sequence.spawn(1)[0] if seed is None else seed)


def examples(count: int) -> int:
    """How many inputs a hypothesis test draws: ten times as many where they are drawn anew."""
    return count if DERANDOMIZED else 10 * count


def seed_by(name: str) -> None:
    """Seed the generators of Python, numpy and torch for a test of this name."""
    global _sequence
    number = crc32(name.encode()) ^ SEED
    _sequence = np.random.SeedSequence(number)
    random.seed(number)
    np.random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def install() -> None:
    """Have numpy's generators without a seed drawn from this module's."""
    setattr(np.random, "default_rng", _generator)  # noqa: B010
