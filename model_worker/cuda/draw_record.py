"""The record of a row that draws on a device: eight bytes for each value, so that all rows travel in one copy.

Knows names and types; knows no requests and no kernels.
"""

from __future__ import annotations

import numpy as np

RECORD = np.dtype(
    [
        ("place", np.int64),  # the row whose last token is drawn
        ("position", np.int64),  # index that the new token will have in its sequence
        ("seed", np.uint64),
        ("greedy", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("log_min_p", np.float64),
        ("mask", np.int64),  # the row's bitmask in the step, or -1
        ("slot", np.int64),  # the row's counts of tokens, or -1
        ("whole_sequence", np.int64),
        ("frequency", np.float64),
        ("presence", np.float64),
        ("repetition", np.float64),
        ("rules", np.int64),  # where its rules begin among the lists of all rows,
        ("rule_count", np.int64),  # and how many there are
        ("restricts", np.int64),  # bits of RESTRICTED and LIMITED
        ("may_stop_at", np.int64),  # the first position at which the row may end
        ("changed", np.int64),  # the row's place among those whose logits change, or -1
        ("report", np.int64),  # the row's place among those that report, or -1
        ("logprobs", np.int64),  # a LogprobMode; NONE: nothing is reported
        ("top_logprobs", np.int64),  # how many of the most probable tokens are
        ("names", np.int64),  # where its named tokens begin among the lists,
        ("name_count", np.int64),  # and how many there are
    ]
)
"""Values that a sampler keeps as float32 are exact as float64."""
NAMES = RECORD.names or ()

# Bits of `restricts`: some tokens may not come, or none but those that are allowed.
RESTRICTED, LIMITED = 1, 2
# A rule is eight bytes: a bias as float32 in the upper half, and below it a token with these bits.
TOKEN_BITS = 28
STOPS, BAD, ALLOWED = 1 << 28, 1 << 29, 1 << 30
