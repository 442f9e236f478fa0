"""Which worker a waiting request goes to, and which requests no worker can run.

`order` is the policy. Everything else here is a constraint that holds for any policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from interfaces import GENERATE, ErrorCode, Finish, PoolingContext, PoolingTask, RequestError, TextContext
from scheduler.limits import Limits
from scheduler.open_requests import OpenRequests
from scheduler.sequence import Sequence
from scheduler.waiting_queue import refusal
from scheduler.workers import Worker

# Tasks whose values are vectors, which can be cut to fewer dimensions.
_VECTOR_TASKS = (PoolingTask.EMBED, PoolingTask.EMBED_TOKENS)


def order(workers: Iterable[Worker], sequence: Sequence) -> list[Worker]:
    """The workers to try for `sequence`, best first: the fewer sequences run there, the better."""
    return sorted(doing(GENERATE, workers), key=lambda worker: worker.rows.running)


def doing(task: str, workers: Iterable[Worker]) -> list[Worker]:
    """The workers that have a task."""
    return [worker for worker in workers if task in worker.hello.tasks]


def tasks(workers: Iterable[Worker]) -> list[str]:
    """What some worker can do."""
    return sorted({task for worker in workers for task in worker.hello.tasks})


def max_model_len(workers: Collection[Worker], wanted: int | None) -> int:
    """Length of the longest sequence that every worker can hold, at most `wanted`; 0 without workers."""
    lengths = [worker.hello.max_model_len for worker in workers]
    return min([*lengths, wanted] if wanted else lengths) if lengths else 0


def vocab_size(workers: Iterable[Worker]) -> int:
    return min((worker.hello.vocab_size for worker in workers), default=0)


def hidden_size(workers: Iterable[Worker]) -> int:
    return min((worker.hello.hidden_size for worker in workers), default=0)


def processors(workers: Collection[Worker]) -> dict[str, str]:
    """The logits processors that all workers have: the schemas of their parameters, by name."""
    first, *others = [worker.hello.processors for worker in workers] or [{}]
    return {name: schema for name, schema in first.items() if all(name in other for other in others)}


def misfit(context: TextContext, workers: Collection[Worker], wanted: int | None) -> RequestError | None:
    """Why these workers can never run a request, or None. `wanted` is the operator's bound for its length."""
    generating = doing(GENERATE, workers)
    if not generating:
        return _no_worker(GENERATE, workers)
    workers = generating
    takes_images = all(worker.hello.images for worker in workers)
    return refusal(context, max_model_len(workers, wanted), vocab_size(workers), hidden_size(workers), takes_images)


def text_misfit(context: PoolingContext, workers: Collection[Worker], wanted: int | None) -> RequestError | None:
    """Why these workers can never compute the texts of a request, or None. `wanted` is as in `misfit`.

    The API checks the same before it submits. Another sender of messages may not have checked.
    """
    able = doing(context.task, workers)
    if not able:
        return _no_worker(context.task, workers)
    longest = int(context.lengths.max())
    most = max_model_len(able, wanted)
    if longest > most:
        text = f"text {int(context.lengths.argmax())} has {longest} tokens; a text may have {most}"
        return RequestError(ErrorCode.TOO_LONG, text)
    known = vocab_size(able)
    if context.tokens.max() >= known:
        return RequestError(ErrorCode.INVALID, f"token ids must be between 0 and {known - 1}")
    width = hidden_size(able)
    if context.dimensions is not None and context.task in _VECTOR_TASKS and context.dimensions > width:
        text = f"dimensions must be at most {width}, the width of this model's vectors, got {context.dimensions}"
        return RequestError(ErrorCode.INVALID, text)
    return None


def _no_worker(task: str, workers: Iterable[Worker]) -> RequestError:
    can = ", ".join(tasks(workers))
    return RequestError(ErrorCode.INVALID, f"no model worker here can {task}: they can {can}")


def place(requests: OpenRequests, limits: Limits, sequence: Sequence) -> bool:
    """Put the next sequence of the queue on the first worker that has room. False if none has.

    Ends the sequence instead if no worker can run it, or if nothing is left to compute.
    """
    workers = requests.workers.values()
    if not workers:
        return False
    if not sequence.checked:
        error = misfit(sequence.context, workers, limits.max_model_len)
        if error is not None:
            requests.refuse_queued(sequence, error)
            return True
        sequence.checked = True
    limit = sequence.limit(max_model_len(doing(GENERATE, workers), limits.max_model_len))
    if len(sequence.tokens) >= limit:
        requests.end_queued(sequence, Finish.LENGTH)
        return True
    quarantine = requests.quarantine
    isolated = quarantine.is_isolated(sequence)
    error = adapter_problem(sequence, workers)
    if error is not None:
        requests.refuse_queued(sequence, error)
        return True
    replica = requests.replicas.number_of(sequence)
    for worker in order(workers, sequence):
        if quarantine.any_isolated(worker.rows.sequences) or (isolated and worker.rows.running):
            continue
        if not worker.weights.ready or (sequence.adapter is not None and worker.adapters.problem(sequence.adapter)):
            continue
        if worker.place(sequence, replica, limit, spare=worker.rows.running):
            _record_placement(requests, worker, sequence, isolated)
            return True
    return False


def adapter_problem(sequence: Sequence, workers: Iterable[Worker]) -> RequestError | None:
    """Why no worker can run a sequence with its adapter, or None."""
    if sequence.adapter is None:
        return None
    problems = [worker.adapters.problem(sequence.adapter) for worker in doing(GENERATE, workers)]
    return RequestError(ErrorCode.FAILED, problems[0]) if problems and all(problems) else None


def _record_placement(requests: OpenRequests, worker: Worker, sequence: Sequence, isolated: bool) -> None:
    sequence.admitted = True
    cached = int(worker.rows.num_computed_tokens[sequence.row])
    requests.waiting.charge(sequence, len(sequence.tokens) - cached)
    alone = ", alone: two workers crashed with it" if isolated else ""
    alone += "; it waits until its adapter is read" if worker.rows.awaits_adapter[sequence.row] else ""
    requests.record(
        sequence,
        f"admitted to worker {worker.hello.index} (epoch {worker.hello.epoch}), row {sequence.row}; "
        f"{cached} of {len(sequence.tokens)} tokens were cached{alone}",
    )
