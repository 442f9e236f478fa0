"""The commands of operators that touch requests or the prefix cache: flush, abort, retract."""

from __future__ import annotations

from collections.abc import Sequence

from interfaces import Finish, Stage
from scheduler.open_requests import OpenRequests


def flush_cache(requests: OpenRequests) -> str:
    """Drop every cached prefix. Returns why not, if requests are open."""
    running = requests.running
    waiting = len(requests.waiting)
    if running or waiting:
        return f"{running} requests run and {waiting} wait; flush the cache when all have ended"
    for worker in requests.workers.values():
        worker.forget_prefixes()
    return ""


def abort(requests: OpenRequests, prefixes: Sequence[str]) -> int:
    """End the requests, of all replicas, whose id begins with one of `prefixes`. Returns their number.

    Their clients keep the tokens they have.
    """
    wanted = tuple(prefixes)
    everyone = requests.replicas.all_sequences()
    chosen = [sequence for sequence in everyone if sequence.context.request_id.startswith(wanted)]
    for sequence in chosen:
        requests.record(sequence, "aborted by an operator", Stage.ENDED)
        replica = requests.replicas.number_of(sequence)
        if sequence.queued_us >= 0:
            requests.publish_placement(sequence, replica)
        requests.outbox.end(replica, sequence.handle, Finish.CANCELLED)
        requests.forget(sequence)
    requests.counters["aborted"] += len(chosen)
    return len(chosen)


def retract(requests: OpenRequests) -> int:
    """Put the running requests back into the queue. Returns their number. They keep tokens and lose blocks."""
    running = [(worker, row) for worker in requests.workers.values() for row in worker.rows.occupied().tolist()]
    for worker, row in running:
        sequence = worker.remove(row)
        sequence.preemptions += 1
        requests.preempt(sequence)
    return len(running)
