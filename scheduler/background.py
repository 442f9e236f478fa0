"""Rows of the lowest priority, of which batches are made: they run while nothing else does.

Beside other rows of their worker they stand still, with their blocks, except those that others wait for. They are
placed where no others are, and give their rows and blocks to others that find no room. Without others they run in short
steps, one at a time, so that a request that comes waits for one short step and not for a queue of long ones.

Knows rows and workers. Does not know batches.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from scheduler.prefill_budget import PREFILL_SHARE
from scheduler.rows import BACKGROUND_ORDER
from scheduler.sequence import Sequence
from scheduler.workers import Worker

# Seconds that rows in decode may take in a step while only such rows are there; prompts may add `PREFILL_SHARE` of it.
# It is more on a device whose shortest steps are longer.
STEP_SECONDS = 0.025
# Steps after which one is longer. Otherwise a length that was measured wrongly stays so.
STEPS_BETWEEN_LONG_ONES = 256
# Prompts of a longer step may have this many times as many tokens. Who comes meanwhile waits for it: without a limit
# one step in so many would take as long as all short ones between two such.
LONG_STEP = 4


def alone(worker: Worker) -> bool:
    """Whether a worker has such rows and no others."""
    return 0 < worker.rows.background == worker.rows.running


def rows_of_step(worker: Worker, rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Those of the runnable `rows` that the next step may compute."""
    table = worker.rows
    if not table.background:
        return rows
    if not alone(worker):
        return rows[worker.prefix_waits.ages(rows) < BACKGROUND_ORDER]
    most = worker.prefill_budget.rows_within(STEP_SECONDS)
    if most is not None and _long_step(worker):
        most = 2 * most + 1  # those whose step was too long: times are known by powers of two
    decoding = rows[table.num_tokens[rows] - table.num_computed_tokens[rows] == 1]
    if most is None or len(decoding) <= most:
        return rows
    late = decoding[np.argsort(table.order[decoding])][most:]
    return rows[~np.isin(rows, late)]


def budget(worker: Worker, rows: NDArray[np.int32], tokens: int) -> int:
    """The most tokens of the next step of these rows, of the `tokens` that any step may have.

    So many rows in decode as were never measured get a step to themselves: its length is not known.
    """
    if not alone(worker):
        return tokens
    table = worker.rows
    decoding = int((table.num_tokens[rows] - table.num_computed_tokens[rows] == 1).sum())
    known = worker.prefill_budget
    share = PREFILL_SHARE * (LONG_STEP if _long_step(worker) else 1)
    prompts = known.tokens_within(STEP_SECONDS, share) if known.knows(decoding) else 0
    return tokens if prompts is None else min(tokens, decoding + prompts)


def may_join(sequence: Sequence, worker: Worker) -> bool:
    """Whether a sequence may be placed on a worker, for all that others run there."""
    return not sequence.background or worker.rows.running == worker.rows.background


def take_one(workers: Collection[Worker]) -> Sequence | None:
    """Take the youngest such row off the worker that has the most of them. None where there is none."""
    worker = max(workers, key=lambda worker: worker.rows.background, default=None)
    if worker is None or not worker.rows.background:
        return None
    occupied = worker.rows.occupied()
    sequence = worker.remove(int(occupied[np.argmax(worker.rows.order[occupied])]))
    sequence.preemptions += 1
    return sequence


def _long_step(worker: Worker) -> bool:
    return worker.in_flight.last_number % STEPS_BETWEEN_LONG_ONES == STEPS_BETWEEN_LONG_ONES - 1
