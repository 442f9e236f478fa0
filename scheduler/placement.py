"""Which worker a waiting request goes to, and which requests no worker can run.

`order` is the policy. Everything else here is a constraint that holds for any policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from interfaces import ErrorCode, Finish, RequestError, TextContext
from scheduler.limits import Limits
from scheduler.open_requests import OpenRequests
from scheduler.sequence import Sequence
from scheduler.waiting_queue import refusal
from scheduler.workers import Worker


def order(workers: Iterable[Worker], sequence: Sequence) -> list[Worker]:
    """The workers to try for `sequence`, best first: the fewer sequences run there, the better."""
    return sorted(workers, key=lambda worker: worker.rows.running)


def max_model_len(workers: Collection[Worker], wanted: int | None) -> int:
    """Length of the longest sequence that every worker can hold, at most `wanted`; 0 without workers."""
    lengths = [worker.hello.max_model_len for worker in workers]
    return min([*lengths, wanted] if wanted else lengths) if lengths else 0


def vocab_size(workers: Iterable[Worker]) -> int:
    return min((worker.hello.vocab_size for worker in workers), default=0)


def hidden_size(workers: Iterable[Worker]) -> int:
    return min((worker.hello.hidden_size for worker in workers), default=0)


def misfit(
    context: TextContext, deterministic: bool, workers: Collection[Worker], wanted: int | None
) -> RequestError | None:
    """Why these workers can never run a request, or None. `wanted` is the operator's bound for its length."""
    if deterministic and any(worker.hello.compiling for worker in workers):
        text = "kernels are being compiled, and a deterministic answer needs them: ask again in a minute"
        return RequestError(ErrorCode.UNAVAILABLE, text)
    return refusal(context, max_model_len(workers, wanted), vocab_size(workers), hidden_size(workers))


def place(requests: OpenRequests, limits: Limits, sequence: Sequence) -> bool:
    """Put the next sequence of the queue on the first worker that has room. False if none has.

    Ends the sequence instead if no worker can run it, or if nothing is left to compute.
    """
    workers = requests.workers.values()
    if not workers:
        return False
    if not sequence.checked:
        error = misfit(sequence.context, sequence.terms.deterministic, workers, limits.max_model_len)
        if error is not None:
            requests.refuse_queued(sequence, error)
            return True
        sequence.checked = True
    limit = sequence.limit(max_model_len(workers, limits.max_model_len))
    if len(sequence.tokens) >= limit:
        requests.end_queued(sequence, Finish.LENGTH)
        return True
    quarantine = requests.quarantine
    isolated = quarantine.is_isolated(sequence)
    replica = requests.replicas.number_of(sequence)
    for worker in order(workers, sequence):
        if quarantine.any_isolated(worker.rows.sequences) or (isolated and worker.rows.running):
            continue
        if worker.place(sequence, replica, limit, spare=worker.rows.running):
            _record_placement(requests, worker, sequence, isolated)
            return True
    return False


def _record_placement(requests: OpenRequests, worker: Worker, sequence: Sequence, isolated: bool) -> None:
    sequence.admitted = True
    cached = int(worker.rows.num_computed_tokens[sequence.row])
    requests.waiting.charge(sequence, len(sequence.tokens) - cached)
    alone = ", alone: two workers crashed with it" if isolated else ""
    requests.record(
        sequence,
        f"admitted to worker {worker.hello.index} (epoch {worker.hello.epoch}), row {sequence.row}; "
        f"{cached} of {len(sequence.tokens)} tokens were cached{alone}",
    )
