"""Which rows run in a worker's next step, and how many tokens of each.

Every sequence in decode gets its token in every step. The rest of the token budget goes to prompts in chunks, oldest
first; a prompt that an older one waits for is as old as that. Beside rows in decode `prefill_budget.py` limits it. When
blocks run out, the youngest sequences make room for older ones and start again later from the tokens they have
(preemption by recompute), so the oldest can always finish. Rows of the lowest priority follow `background.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from interfaces import Join, RowGrammar, Step
from scheduler import background
from scheduler.sequence import Sequence
from scheduler.workers import Worker

# Tokens of prompts whose log-probabilities or hidden states one step reports. Each costs a row of logits.
REPORTED_TOKENS = 256

_NO_BLOCKS = np.empty((0, 3), np.int32)
_NO_ROWS = np.empty(0, np.int32)

Preempted = Callable[[Sequence], None]


def build_step(worker: Worker, incarnation: int, budget: int, most_guesses: int, preempted: Preempted) -> Step | None:
    """Build the next step for `worker` and count it as sent; None when nothing can run.

    Rows in decode get room for up to `most_guesses` guesses each. `preempted` gets each sequence that had to leave.
    """
    worker.beginnings.settle_waits()
    rows = _with_blocks(worker, preempted)
    if not len(rows) and not worker.must_hear:
        return None
    ntok = _chunks(worker, rows, background.budget(worker, rows, max(budget, worker.rows.running)))
    if ntok is not None:
        chosen = ntok > 0
        rows = rows[chosen]
        ntok = ntok[chosen]
        if not len(rows) and not worker.must_hear:
            return None
    joining = worker.changes.joining
    joins = [_join(worker, sequence) for sequence in joining]
    ahead = worker.send(rows, ntok, most_guesses)
    worker.rows.joined[[sequence.row for sequence in joining]] = worker.in_flight.last_number
    drop, blocks = worker.changes.take()
    save, load = worker.spill.take_orders()
    return Step(
        incarnation=incarnation,
        epoch=worker.hello.epoch,
        step=worker.in_flight.last_number,
        rows=rows,
        ntok=ntok,
        new_blocks=np.array(blocks, np.int32) if blocks else _NO_BLOCKS,
        drop=np.array(drop, np.int32) if drop else _NO_ROWS,
        joins=joins,
        ahead=ahead,
        save=save,
        load=load,
    )


def _with_blocks(worker: Worker, preempted: Preempted) -> NDArray[np.int32]:
    """Give runnable rows the blocks that they lack. Returns the rows that have blocks for all their tokens."""
    table = worker.rows
    rows = background.rows_of_step(worker, table.runnable())
    crossing = rows[table.num_tokens[rows] + table.ahead[rows] > table.num_blocks[rows] * worker.block_size]
    if not len(crossing):
        return rows
    stalled = {
        row
        for row in crossing[np.argsort(table.order[crossing])].tolist()
        if table.in_use[row] and not _grow(worker, row, preempted)
    }
    rows = rows[table.in_use[rows]]
    return rows[[row not in stalled for row in rows.tolist()]] if stalled else rows


def _grow(worker: Worker, row: int, preempted: Preempted) -> bool:
    """Give `row` the blocks it lacks, from younger rows if there are no others. False if all are of older rows."""
    table = worker.rows
    while table.num_tokens[row] + table.ahead[row] > table.num_blocks[row] * worker.block_size:
        while worker.pool.available == 0:
            occupied = table.occupied()
            youngest = int(occupied[np.argmax(table.order[occupied])])
            if table.order[youngest] <= table.order[row]:
                return False
            sequence = worker.remove(youngest)
            sequence.preemptions += 1
            preempted(sequence)
        worker.grow(row)
    return True


def _chunks(worker: Worker, rows: NDArray[np.int32], budget: int) -> NDArray[np.int32] | None:
    """Tokens that each row computes in this step: one for rows in decode, the rest of `budget` for prompts by age.

    None if every row computes one.
    """
    table = worker.rows
    todo = np.minimum(table.num_tokens[rows], table.upto[rows]) - table.num_computed_tokens[rows]
    if (todo == 1).all():
        return None
    ntok: NDArray[np.int32] = np.minimum(todo, 1)
    left = budget - len(rows)
    prefill = np.flatnonzero(todo > 1)
    # A prompt is guaranteed no token: a single one would waste a row of the forward.
    ntok[prefill] = 0
    left += len(prefill)
    decoding = len(rows) - len(prefill)
    beside = worker.prefill_budget.prompt_tokens(decoding, todo[prefill].tolist(), budget) if decoding else None
    left = left if beside is None else min(left, beside)
    reportable = REPORTED_TOKENS
    for i in prefill[np.argsort(worker.prefix_waits.ages(rows[prefill]))].tolist():
        reports = table.num_computed_tokens[rows[i]] < table.report_end[rows[i]]
        most = min(left, reportable) if reports else left
        share = min(int(todo[i]), most)
        if table.fixed[rows[i]]:
            share = _piece(worker, int(rows[i]))
        share = worker.images.whole(int(rows[i]), share)
        if share > int(todo[i]):
            continue  # a piece waits for an image
        if share > most and ntok[prefill].any():
            continue  # a later step has room: a piece may exceed the budget when nothing else is computed
        ntok[i] = share
        left -= share
        reportable -= share if reports else 0
        if left <= 0:
            break
    return ntok


def _piece(worker: Worker, row: int) -> int:
    """Tokens that a row which runs alone computes next: a fixed piece of its prompt, or one token of its answer."""
    computed = int(worker.rows.num_computed_tokens[row])
    prompt = int(worker.rows.fixed[row])
    piece = worker.beginnings.fixed_tokens
    return min(piece - computed % piece, prompt - computed) if computed < prompt else 1


def _join(worker: Worker, sequence: Sequence) -> Join:
    return Join(
        row=sequence.row,
        tokens=sequence.array(),
        prompt_len=sequence.prompt_len,
        start=int(worker.rows.num_computed_tokens[sequence.row]),
        sampling=sequence.sampling,
        report_from=sequence.next_report if sequence.reports_prompt else None,
        images=sequence.images,
        hidden_from=sequence.next_hidden if sequence.context.hidden_states else None,
        embeddings=sequence.context.prompt_embeddings,
        grammar=RowGrammar.of(sequence.context),
        isolated=worker.beginnings.runs_alone(sequence),
        adapter=sequence.adapter.handle if sequence.adapter is not None else 0,
        salt=sequence.salt(),
    )
