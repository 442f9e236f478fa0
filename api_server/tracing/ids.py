"""Random ids of spans and traces. Zero is none."""

from __future__ import annotations

import random


def random_span_id() -> int:
    return random.getrandbits(64) or 1


def random_trace_id() -> int:
    return random.getrandbits(128) or 1
