"""The policy of placement: where a request costs least, by the scheduler's own index and queue.

The cost of a worker is its backlog, plus the number of tokens that it would have to compute for the request. A busy
worker counts these twice: they delay this request, and then those behind it. Counted once, requests of a burst computed
prefixes anew on workers that had only one prefix less to compute. An idle worker counts them once: nothing is behind
them. So a request may wait for a worker that has its prefix although a busy one would compute it sooner, but not longer
than an idle one takes. The index is exact: it is the block table that the scheduler keeps for each worker, with the
blocks that are being computed now. A prefix that many requests share stays on one worker until the backlog there is
larger than the prefix, beside an idle worker, or than twice the prefix and the backlog of a busy one; from then on two
workers have it.

Rows of the lowest priority stand still beside others (`background.py`), so they are no backlog for these.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from scheduler.sequence import Sequence
from scheduler.workers import Worker

# A token to compute costs a busy worker as many tokens of backlog. From 1.5 on, bursts keep to their prefixes.
WEIGHT_OF_NEW_TOKENS = 2
# A running sequence counts as this many tokens in a backlog: it takes a part of each step until it ends.
TOKENS_OF_A_ROW = 32
# A worker may run this many sequences more than another one, or half as many again, whichever is more.
ROWS_APART = 8


class Choice(NamedTuple):
    """A worker that may run a sequence.

    It has or is computing `match` of its tokens, or can load them. It would have to compute `new_tokens`, and has a
    backlog, in tokens; the time of a load counts as the tokens that could be computed in it. It runs so many sequences
    that run beside this one.
    """

    worker: Worker
    match: int
    new_tokens: int
    backlog: int
    running: int

    @property
    def cost(self) -> int:
        return (WEIGHT_OF_NEW_TOKENS if self.backlog else 1) * self.new_tokens + self.backlog


# Returns the workers to try for a sequence, best first. The number is the most tokens in a step.
Policy = Callable[[Items[Worker], Sequence, int], list[Choice]]


def least_cost(workers: Items[Worker], sequence: Sequence, step_tokens: int) -> list[Choice]:
    """The workers to try, least cost first; among equals, the one with the fewest sequences, then the lowest index.

    A worker that runs many more sequences than another comes last, unless its match saves more than a full step.
    """
    choices = [choice_of(worker, sequence) for worker in workers]
    if len(choices) < 2:
        return choices
    fewest = min(choice.running for choice in choices)
    most = most_beside(fewest)
    best = max(choice.match for choice in choices if choice.running <= most)

    def rank(choice: Choice) -> tuple[bool, int, int, int, int]:
        crowded = choice.running > most and choice.match - best <= step_tokens
        # A short step of rows that will stand still may be under way where they are.
        return crowded, choice.cost, choice.running, choice.worker.rows.running, choice.worker.hello.index

    return sorted(choices, key=rank)


def most_beside(fewest: int) -> int:
    """The number of sequences beyond which a worker gets no more, while another one runs `fewest`."""
    return fewest + max(ROWS_APART, fewest // 2)


def choice_of(worker: Worker, sequence: Sequence) -> Choice:
    """What it costs to run a sequence on a worker."""
    match, loading = worker.match_tokens(sequence)
    rows = worker.rows
    running = rows.running if sequence.background else rows.running - rows.background
    backlog = rows.tokens_to_compute(sequence.background) + TOKENS_OF_A_ROW * running
    return Choice(worker, match, len(sequence.tokens) - match + loading, backlog, running)
