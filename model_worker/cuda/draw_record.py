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
    ]
)
"""Values that a sampler keeps as float32 are exact as float64."""
NAMES = RECORD.names or ()
