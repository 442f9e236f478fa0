"""What Triton's kernels of a draw read of a row: its record, its largest logit, and its logits shifted and scaled.

The record is that of draw_record.py. Knows no requests and no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from interfaces import LogprobMode
from model_worker.cuda.draw_record import NAMES

# triton leaves its decorator untyped.
_jit: Any = triton.jit

WORDS = tl.constexpr(len(NAMES))
PLACE = tl.constexpr(NAMES.index("place"))
POSITION = tl.constexpr(NAMES.index("position"))
SEED = tl.constexpr(NAMES.index("seed"))
GREEDY = tl.constexpr(NAMES.index("greedy"))
TEMPERATURE = tl.constexpr(NAMES.index("temperature"))
TOP_K = tl.constexpr(NAMES.index("top_k"))
TOP_P = tl.constexpr(NAMES.index("top_p"))
LOG_MIN_P = tl.constexpr(NAMES.index("log_min_p"))
MASK = tl.constexpr(NAMES.index("mask"))
SLOT = tl.constexpr(NAMES.index("slot"))
WHOLE_SEQUENCE = tl.constexpr(NAMES.index("whole_sequence"))
FREQUENCY = tl.constexpr(NAMES.index("frequency"))
PRESENCE = tl.constexpr(NAMES.index("presence"))
REPETITION = tl.constexpr(NAMES.index("repetition"))
RULES = tl.constexpr(NAMES.index("rules"))
RULE_COUNT = tl.constexpr(NAMES.index("rule_count"))
RESTRICTS = tl.constexpr(NAMES.index("restricts"))
MAY_STOP_AT = tl.constexpr(NAMES.index("may_stop_at"))
CHANGED = tl.constexpr(NAMES.index("changed"))
REPORT = tl.constexpr(NAMES.index("report"))
LOGPROBS = tl.constexpr(NAMES.index("logprobs"))
TOP_LOGPROBS = tl.constexpr(NAMES.index("top_logprobs"))
NAMED = tl.constexpr(NAMES.index("names"))
NAME_COUNT = tl.constexpr(NAMES.index("name_count"))
TEMPERED = tl.constexpr(LogprobMode.TEMPERED)
WARPED = tl.constexpr(LogprobMode.WARPED)


@_jit
def integer(records, row, WORD: tl.constexpr):
    """Return an integer of a row's record."""
    return tl.load(records + row * WORDS + WORD)


@_jit
def real(records, row, WORD: tl.constexpr):
    """Return a float64 of a row's record."""
    return tl.load(records + row * WORDS + WORD).to(tl.float64, bitcast=True)


@_jit
def scaled(x, top, temperature):
    """Shift logits so that the largest of their row is 0, and divide by the temperature, in float32."""
    shifted = x.to(tl.float32) - top
    return tl.div_rn(shifted, tl.zeros_like(shifted) + temperature)


@_jit
def largest_of_row(tops, row, tiles, TILES: tl.constexpr):
    """Return the largest of a row's logits, given those of its tiles, and whether it is finite."""
    at = tl.arange(0, TILES)
    found = tl.load(tops + row * tiles + at, mask=at < tiles, other=float("-inf"))
    top = tl.max(tl.where(found == found, found, float("-inf")), 0)
    # No number differs from itself, nor from infinity by none.
    return top, (tl.sum((found != found).to(tl.int32), 0) == 0) & ((top - top) == 0)
